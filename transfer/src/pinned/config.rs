//! The configuration of a pool of pinned memory.

use std::num::NonZeroUsize;

/// The configuration of a pool of pinned memory.
///
/// ```
/// use std::num::NonZeroUsize;
/// use aquifer::transfer::PinnedConfig;
/// let threads = NonZeroUsize::new(8).unwrap();
/// let config = PinnedConfig::default().limit_bytes(16 << 30).register_threads(threads);
/// assert_eq!(config.limit_bytes, Some(16 << 30));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedConfig {
    /// The most bytes that the pool may hold from the system; `None` means no limit but the
    /// system's. A runtime's own copies of ordinary memory take from its pool, too: they fail while
    /// the caller's buffers hold all of it. The staging ring takes at most half of it.
    pub limit_bytes: Option<u64>,
    /// `None`: the driver allocates slabs (`cuMemHostAlloc`), on one thread. Otherwise they are
    /// ordinary memory, in huge pages where the system has them, that so many threads touch in
    /// parallel, 16 MiB or more each, and that is then pinned (`cuMemHostRegister`): so the
    /// system clears pages on several cores, and locks few large ones. Giving a slab back waits for
    /// the device. As PyTorch's `pinned_use_cuda_host_register` and `pinned_num_register_threads`,
    /// of which it says that 8 threads served best.
    pub register_threads: Option<NonZeroUsize>,
}

impl PinnedConfig {
    /// Sets [`PinnedConfig::limit_bytes`].
    #[must_use]
    pub fn limit_bytes(self, bytes: u64) -> Self {
        Self { limit_bytes: Some(bytes), ..self }
    }

    /// Sets [`PinnedConfig::register_threads`].
    #[must_use]
    pub fn register_threads(self, threads: NonZeroUsize) -> Self {
        Self { register_threads: Some(threads), ..self }
    }
}
