"""DeepSpeed ZeRO-0 to ZeRO-3 behind the engine interface."""
