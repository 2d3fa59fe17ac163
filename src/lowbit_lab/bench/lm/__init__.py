"""Language models as lowbit and other libraries run them, each in a worker."""
