"""Search within budgets: backends, formats and dtypes tried in isolated processes, the best one published."""
