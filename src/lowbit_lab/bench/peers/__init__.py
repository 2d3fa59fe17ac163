"""The implementations that are compared, one library a file. Importing a file registers it."""
