//! A caching allocator for GPU memory.
