"""Commands under the module names that documents of Cosmos-Predict use."""
