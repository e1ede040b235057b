"""The networks, the catalog of their names, their weights and their files."""
