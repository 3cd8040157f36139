"""The model as modules, its weights and its Engram memory. Import the files themselves."""
