//! What an allocator tells: statistics, snapshots, history, fragmentation.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::accounting::fragmentation::{Fragmentation, measure};
use crate::accounting::{Attribution, MemoryStats, attribute, memory_stats, summary};
use crate::allocator::Allocator;
use crate::config::Backing;
use crate::error::AllocError;
use crate::history::HistoryOptions;
use crate::size_class::PoolKind;
use crate::snapshot::{Snapshot, take};

impl Allocator {
    /// The allocator's statistics.
    pub fn stats(&self) -> MemoryStats {
        memory_stats::stats(self)
    }

    /// The most bytes that were allocated at once since the last [`Allocator::reset_peak_stats`],
    /// as PyTorch's `max_memory_allocated()`.
    pub fn max_memory_allocated(&self) -> u64 {
        self.stats().allocated_bytes.all.peak
    }

    /// The most bytes that were reserved from the device at once since the last
    /// [`Allocator::reset_peak_stats`], as PyTorch's `max_memory_reserved()`.
    pub fn max_memory_reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.peak
    }

    /// Sets every peak to the current value.
    pub fn reset_peak_stats(&self) {
        self.state().enter().counters.reset_peaks();
    }

    /// Starts the accumulated values (`allocated`, `freed`) and the numbers of events (`num_…`)
    /// from zero.
    pub fn reset_accumulated_stats(&self) {
        self.state().enter().counters.reset_accumulated();
    }

    /// Takes a snapshot of the memory and, if it is recorded, the history. The two agree: undoing
    /// the history's entries from the last to the first, starting from the segments, meets no
    /// contradiction.
    ///
    /// All of it is of one moment: other threads that allocate wait while the blocks are copied. As in
    /// PyTorch, an [`crate::Action::Snapshot`] is recorded, which later snapshots show.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::parse("history:1000")?)?;
    /// let buffer = allocator.alloc_bytes((1 << 20) + 512, device.default_stream())?;
    /// let snapshot = allocator.snapshot();
    /// assert!(snapshot.segments[0].is_expandable);
    /// assert_eq!(snapshot.trace().len(), 2); // segment_map and alloc
    /// # drop(buffer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn snapshot(&self) -> Snapshot {
        take::snapshot(self)
    }

    /// Starts recording history, or changes how it is recorded. Snapshots contain it.
    ///
    /// Entries recorded before are kept, as far as there is room, unless `clear` is set.
    pub fn record_history(&self, options: HistoryOptions) {
        let mut guard = self.state().lock();
        if options.clear {
            guard.history.clear();
        }
        guard.history.record(options.entries, &options.skip);
    }

    /// Stops recording history and forgets all entries.
    pub fn stop_history(&self) {
        self.record_history(HistoryOptions::default());
    }

    /// How fragmented the memory of all pools is, and how much of it a request of `request_bytes`
    /// cannot use.
    ///
    /// Costs a pass over all blocks. Locks are held for some of them at a time: while other threads
    /// allocate, each block counts as it was at some moment of the call, and no byte of memory in
    /// blocks counts twice.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let small = allocator.alloc_bytes(600, device.default_stream())?;
    /// let fragmentation = allocator.fragmentation(4 << 20);
    /// assert_eq!(fragmentation.internal_waste, 1024 - 600);
    /// assert_eq!(fragmentation.largest_free_block, (2 << 20) - 1024);
    /// assert_eq!((fragmentation.external, fragmentation.unusable), (0.0, 1.0));
    /// println!("{fragmentation}");
    /// # drop(small);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fragmentation(&self, request_bytes: u64) -> Fragmentation {
        measure(self, request_bytes, |_| true)
    }

    /// As [`Allocator::fragmentation`], for the pools of one kind.
    pub fn fragmentation_in(&self, kind: PoolKind, request_bytes: u64) -> Fragmentation {
        measure(self, request_bytes, |other| other == kind)
    }

    /// The device's memory by holder: this allocator, others of the process, the rest of the
    /// process, other processes; and a headroom for libraries.
    ///
    /// Asks the driver, and on a GPU NVML, which takes milliseconds at the first call
    /// ([`aquifer_device::Device::memory_users`]).
    ///
    /// # Errors
    /// When the driver cannot tell the device's memory.
    pub fn attribution(&self) -> Result<Attribution, AllocError> {
        Ok(attribute::attribute(self, Some(Duration::ZERO))?)
    }

    /// A table of the statistics: bytes and numbers of allocated, active and reserved memory and so
    /// on, each with the current value, the peak, and the sums of increases and decreases. Below
    /// them is the device's memory by holder ([`Allocator::attribution`]), unless the driver fails.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// print!("{}", allocator.summary());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn summary(&self) -> String {
        summary::summary(self)
    }

    /// The backing in use: [`crate::Config::backing`] where the device can map memory, else
    /// [`Backing::Segments`]. In the latter case a warning was logged, and
    /// [`Allocator::why_segments`] says why.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, WhySegments, config::Backing};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::parse("1GiB,vmm=off")?));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// assert_eq!(allocator.config().backing, Backing::Paged);
    /// assert_eq!(allocator.backing(), Backing::Segments);
    /// assert_eq!(allocator.why_segments(), Some(&WhySegments::DeviceCannot));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn backing(&self) -> Backing {
        if self.why_segments().is_some() { Backing::Segments } else { Backing::Paged }
    }

    /// The size in bytes of a granule, the unit in which physical memory is counted and mapped;
    /// `None` if memory comes in segments.
    pub fn granule_bytes(&self) -> Option<u64> {
        self.state().shared().paged.as_ref().map(|paged| paged.granule)
    }

    /// Bytes that each private pool holds from the device, by its id, for open pools and for closed
    /// ones that still hold memory. They are part of `reserved_bytes`.
    pub fn reserved_by_private_pools(&self) -> BTreeMap<(u64, u64), u64> {
        memory_stats::reserved_by_private_pools(self)
    }
}
