"""What a sweep found: its ranked table, its figures and its report, from MLflow or from files."""
