"""Products: what is asked for as one record, prepared by one function, runnable on addresses."""
