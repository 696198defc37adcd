"""`mmldlm prepare`: the stages that turn a corpus into a store."""
