"""Compare fxpart's predictions with measurements that others published."""
