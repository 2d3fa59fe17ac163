"""What a result is shown by: texts of numbers, tables, charts, a page."""
