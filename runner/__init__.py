"""The experiment runner: Hydra and MLflow live here, and only here."""
