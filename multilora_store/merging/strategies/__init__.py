"""The built-in merge strategies: pure functions, declared by name in `multilora_store.plugins.BUILTINS`."""
