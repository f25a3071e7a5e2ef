"""The results of a sweep: ranked table, figures and report, from MLflow or from files."""
