"""The command `nanoinfer`: one file per verb."""
