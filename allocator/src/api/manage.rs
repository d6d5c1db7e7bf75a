//! What else a program asks of an allocator: giving memory back, sleep, private pools, callbacks,
//! mappings.

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::Stream;

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::backing::paged::{peers, pin, sleep};
use crate::backing::{Part, PinnedMapping, SleepOptions, trim};
use crate::error::AllocError;
use crate::keep_awake::{self, Awake};
use crate::pools::table::PoolOptions;
use crate::pools::{CaptureRoute, PrivatePool, private_pool};
use crate::recovery::hooks::ReclaimRequest;
use crate::recovery::{MappingChange, OomReport, Registration};

impl Allocator {
    /// Gives unused memory back to the device and returns how many bytes that was: whole unused
    /// segments, or where memory is mapped the granules that lie in free blocks. Memory of open
    /// private pools stays. Waits for blocks that other streams still use.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn empty_cache(&self) -> Result<u64, AllocError> {
        let released = self.trim_to(0)?;
        drop(sleep::take_host_buffers(self));
        Ok(released)
    }

    /// As [`Allocator::empty_cache`], but only until at most `bytes` are held from the device, the
    /// largest segments first. Returns how many bytes went back. Waits for blocks that other
    /// streams still use only if unused memory does not suffice.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn trim_to(&self, bytes: u64) -> Result<u64, AllocError> {
        trim::trim_to(self, bytes)
    }

    /// Gives mapped memory back to the device until [`Allocator::wake`]: all of it, or some parts
    /// ([`SleepOptions`]; [`Contents`](crate::Contents) alone stands for all). Returns how many
    /// bytes went back, with all of it free memory included. Addresses stay reserved: after waking
    /// up, allocations and their pointers are as before, and meanwhile they may be dropped. Memory
    /// comes back in units of a granule, and only where live allocations lie or a graph may use it.
    ///
    /// Segments, exportable memory and pinned granules stay. So do frames, mostly of one to a few
    /// granules, in which allocations of other parts lie: what of a part lies in these stays awake,
    /// with its contents. Allocations that were made of a part after it fell asleep are awake,
    /// until it is put to sleep once more.
    ///
    /// This fails while anything keeps the allocator awake: access guards ([`crate::AccessGuard`])
    /// and reservations ([`crate::Reservation`]) with its memory, as transfers have until they are
    /// enqueued, and [`Allocator::keep_awake`]. With [`SleepOptions::waiting`] it waits for the end
    /// of these. Then it waits for the device. So kernels that other threads launch come before the
    /// sleep or are refused.
    ///
    /// Until the memory wakes up, access guards and reservations of it fail with
    /// [`AllocError::Asleep`], and if all memory sleeps, allocations do. Work that bypasses access
    /// guards, and graphs, must not touch it. Threads that allocate while everything falls asleep
    /// may still be served, with memory that is there after waking up. Statistics count the memory
    /// held now; snapshots show the memory that will be there after waking up. If all memory sleeps
    /// already, this does nothing.
    ///
    /// Page-locked memory for contents takes a while to get, so it is kept for the next sleep,
    /// until [`Allocator::empty_cache`].
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, Contents};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.stream()?;
    /// let weights = allocator.alloc_bytes(4 << 20, &stream)?;
    /// stream.fill(weights.ptr(), 7, 4 << 20)?;
    /// assert_eq!(allocator.sleep(Contents::SaveToHost)?, 4 << 20);
    /// assert_eq!(allocator.memory_reserved(), 0); // another program may use the device now
    /// allocator.wake()?;
    /// let mut byte = [0];
    /// stream.download_blocking(&mut byte, weights.ptr())?;
    /// assert_eq!(byte, [7]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`AllocError::NotMapped`] where memory comes in segments; [`AllocError::KeptAwake`], which
    /// says what keeps the allocator awake; [`AllocError::OutOfHostMemory`];
    /// [`AllocError::SavedFile`]; errors of the driver. The memory is then awake as before, with
    /// its contents unless they were to be discarded. If the driver fails at waking it up, too,
    /// [`Allocator::sleeping_bytes`] is not 0, and [`Allocator::wake`] can be tried.
    pub fn sleep(&self, options: impl Into<SleepOptions>) -> Result<u64, AllocError> {
        sleep::sleep(self, &options.into())
    }

    /// Ends [`Allocator::sleep`]: takes memory from the device for the allocations that are still
    /// live, maps it where it was, and restores saved contents. The limit is not checked, because
    /// this memory was held before. If the allocator is awake already, this does nothing. While
    /// another thread puts it to sleep, this waits for that first.
    ///
    /// # Errors
    /// Errors of the driver. If the device lacks memory, the error says how much is needed and how
    /// much is free, and everything taken so far goes back. The allocator is still asleep then,
    /// nothing is lost, and this can be tried again.
    pub fn wake(&self) -> Result<(), AllocError> {
        sleep::wake(self)
    }

    /// As [`Allocator::wake`], for some of the memory that sleeps. If the whole allocator sleeps,
    /// it is awake afterwards and serves allocations, and the rest of its memory sleeps on, as if
    /// only that had been put to sleep.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, Contents, Part, SleepOptions, TagScope};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.stream()?;
    /// let alloc = |tag| {
    ///     let _scope = TagScope::new(tag);
    ///     allocator.alloc_bytes(8 << 20, &stream)
    /// };
    /// let (weights, cache) = (alloc("weights")?, alloc("kv_cache")?);
    /// allocator.sleep(SleepOptions::all(Contents::Discard).with(Part::tag("weights"), Contents::SaveToHost))?;
    /// allocator.wake_parts(&[Part::tag("weights")])?;
    /// assert_eq!(allocator.memory_reserved(), 8 << 20); // the cache has no memory so far
    /// stream.fill(weights.ptr(), 1, weights.bytes())?;
    /// allocator.wake()?;
    /// stream.fill(cache.ptr(), 0, cache.bytes())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Allocator::wake`].
    pub fn wake_parts(&self, parts: &[Part]) -> Result<(), AllocError> {
        sleep::wake_parts(self, parts)
    }

    /// Bytes of addresses that sleep: they have no memory, and access guards there are refused.
    pub fn sleeping_bytes(&self) -> u64 {
        let shared = self.state().shared();
        let sleeping = shared.paged.iter().flat_map(|paged| &paged.sleeping);
        sleeping.map(|range| range.end - range.start).sum()
    }

    /// True if the allocator sleeps, or is about to and refuses access guards already. To wait for
    /// the end of that, see [`Allocator::wait_awake`].
    pub fn is_asleep(&self) -> bool {
        self.state().is_quiescing()
    }

    /// Keeps the allocator awake until the result is dropped: [`Allocator::sleep`] fails or waits
    /// until then.
    /// It is for work in several steps that would be in vain if the allocator slept in between,
    /// such as allocating memory and then using it. Work that bypasses access guards may use the
    /// memory meanwhile, too.
    ///
    /// ```
    /// use std::time::Duration;
    /// use aquifer_allocator::{AllocError, Allocator, Config, Contents, SleepOptions};
    /// use aquifer_device::Device;
    /// use aquifer_sim::SimDriver;
    /// let device = Device::new(SimDriver::new(Default::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.stream()?;
    /// let awake = allocator.keep_awake()?;
    /// let control = std::thread::spawn({
    ///     let allocator = allocator.clone();
    ///     let options = SleepOptions::all(Contents::SaveToHost).waiting(Duration::from_secs(60));
    ///     move || allocator.sleep(options) // waits for the request to be served
    /// });
    /// let request = allocator.alloc_bytes(4 << 20, &stream)?;
    /// stream.fill(request.ptr(), 7, 4 << 20)?;
    /// drop(awake);
    /// assert_eq!(control.join().unwrap()?, 4 << 20);
    /// assert!(matches!(allocator.keep_awake(), Err(AllocError::Asleep)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`AllocError::Asleep`] when the allocator sleeps, or is about to and this thread does not
    /// keep it awake already.
    pub fn keep_awake(&self) -> Result<Awake, AllocError> {
        keep_awake::keep_awake(self)
    }

    /// Waits until the allocator is awake, for at most `timeout`. Returns true if it is awake, and
    /// false if it sleeps still, or is about to sleep. A thread that keeps it awake itself does not
    /// wait. It may fall asleep again before this returns, so requests after it are still to be
    /// tried again, unless [`Allocator::keep_awake`] succeeds first.
    ///
    /// ```
    /// use std::time::Duration;
    /// use aquifer_allocator::{AllocError, Allocator, Config, Contents};
    /// use aquifer_device::Device;
    /// use aquifer_sim::SimDriver;
    /// let device = Device::new(SimDriver::new(Default::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.stream()?;
    /// allocator.sleep(Contents::SaveToHost)?;
    /// assert!(!allocator.wait_awake(Duration::from_millis(1)));
    /// let control = std::thread::spawn({
    ///     let allocator = allocator.clone();
    ///     move || allocator.wake()
    /// });
    /// let request = loop {
    ///     match allocator.alloc_bytes(4 << 20, &stream) {
    ///         Err(AllocError::Asleep) if allocator.wait_awake(Duration::from_secs(60)) => {}
    ///         done => break done?,
    ///     }
    /// };
    /// # drop(request);
    /// # control.join().unwrap()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(hidden)]
    pub fn wait_awake(&self, timeout: Duration) -> bool {
        keep_awake::wait_awake(self, timeout)
    }

    /// Creates a private pool.
    ///
    /// # Errors
    /// When there are too many pools: some 16 000.
    pub fn create_pool(&self, options: PoolOptions) -> Result<PrivatePool, AllocError> {
        private_pool::create_pool(self, options)
    }

    /// Announces that `stream` captures, and that allocations of the calling thread until the
    /// result is dropped are for the graph: they come from `pool`. Call it when the capture has
    /// begun, whether by [`Stream::begin_capture`], by cudarc, or by another library. Drop the
    /// result when the capture has ended.
    ///
    /// Where a library tells in two steps, as PyTorch does, there is a call for each. PyTorch calls
    /// an allocator's `beginAllocateToPool` before the capture begins, and `endAllocateToPool`
    /// after it has ended: between them hold [`PrivatePool::route_thread`]. Hold
    /// [`Stream::announce_capture`] from `markCaptureBegin` to `markCaptureEnd`, or, in versions
    /// without these, from the first request of the stream on.
    ///
    /// Memory of the graph may have been used before the capture by work that is not done yet.
    /// [`aquifer_device::Graph::launch`] orders the graph after that work. A graph that another
    /// library launches is ordered only by the stream that it is launched on. If that is not the
    /// stream that it was captured on, launch it after that stream's earlier work.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, PoolOptions};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let (stream, pool) = (device.stream()?, allocator.create_pool(PoolOptions::default())?);
    /// let capture = stream.begin_capture()?;
    /// let route = allocator.capture(&stream, &pool)?;
    /// let scratch = allocator.alloc_bytes(1 << 20, &stream)?;
    /// stream.fill(scratch.ptr(), 7, 1 << 20)?;
    /// drop(scratch); // the pool keeps it for the graph
    /// let graph = capture.end()?;
    /// drop(route);
    /// graph.launch(&stream)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the stream is of another device, the pool is of another allocator, or the stream does
    /// not capture; errors of the driver.
    pub fn capture(&self, stream: &Stream, pool: &PrivatePool) -> Result<CaptureRoute, AllocError> {
        private_pool::capture(self, stream, pool)
    }

    /// Registers the callback `reclaim`, which is called when a request would fail otherwise:
    /// unused memory has gone back to the device, streams were waited for, and neither helped. It
    /// is to free [`ReclaimRequest::bytes`] or more by dropping handles, or as much as it can, and
    /// to return how many bytes it freed. 0 means that it has nothing to free.
    ///
    /// *How often.* Reclaimers of higher `priority` are called first, those of equal priority in
    /// the order of registration. After each one that freed something the request is tried again,
    /// once streams that still use the memory are done with it. If the request still does not fit
    /// when all were called, because the freed memory is in pieces, they are called again for twice
    /// as much, and so on up to all that the device has; those that returned 0 or panicked are left
    /// out. So a request fails only when reclaimers have nothing more, and one that only claims to
    /// free memory is called a bounded number of times.
    ///
    /// *Where.* It runs on the thread that made the request, and on several threads at once if
    /// several run out of memory. The allocator holds no lock, but the caller may. So a reclaimer
    /// that shares a lock with code that allocates must only try to take it, and return 0 if it is
    /// taken.
    ///
    /// *The report.* The report of a request that fails lists the reclaimers, what they
    /// freed, and why they freed no more, if they say so ([`ReclaimRequest::explain`]).
    ///
    /// *What it may do.* It may free and allocate, also from this allocator. An allocation that
    /// fails inside it returns an error there and calls no reclaimers. It may end registrations,
    /// including its own. A panic in it is logged and goes no further; it counts as having freed
    /// nothing, but any memory that it freed still serves the request.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use aquifer_allocator::{Allocation, Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::parse("64MiB")?));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.default_stream();
    /// let cache = Arc::new(Mutex::new(Vec::<Allocation>::new()));
    /// let evicted = cache.clone();
    /// let registration = allocator.register_reclaimer(0, "cache", move |request| {
    ///     let Ok(mut cache) = evicted.try_lock() else { return 0 };
    ///     let mut freed = 0;
    ///     while freed < request.bytes {
    ///         let Some(block) = cache.pop() else { break };
    ///         freed += block.bytes();
    ///     }
    ///     freed
    /// });
    /// for _ in 0..60 {
    ///     let block = allocator.alloc_bytes(1 << 20, stream)?;
    ///     cache.lock().unwrap().push(block); // not locked while it allocates
    /// }
    /// let large = allocator.alloc_bytes(40 << 20, stream)?; // 36 blocks are evicted for it
    /// assert!(cache.lock().unwrap().len() >= 20);
    /// # drop((large, registration));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn register_reclaimer(
        &self,
        priority: i32,
        name: &str,
        reclaim: impl Fn(&ReclaimRequest) -> u64 + Send + Sync + 'static,
    ) -> Registration {
        self.hooks().add_reclaimer(priority, name, Arc::new(reclaim))
    }

    /// Registers the callback `observe`, which is called with the report before an out-of-memory
    /// error is returned. It runs with no lock of the allocator held, on the thread that made the
    /// request, so it may free and allocate. An allocation that fails inside it returns an error
    /// there and calls no observer. A panic in it is logged and goes no further: the caller still
    /// gets the error.
    pub fn observe_oom(&self, observe: impl Fn(&OomReport) + Send + Sync + 'static) -> Registration {
        self.hooks().add_observer(Arc::new(observe))
    }

    /// Registers the callback `observe`, which is called before memory is unmapped and after memory
    /// was mapped: by growth, by moving memory, by splitting frames, by giving memory back, by
    /// [`crate::Growable`], and by [`Allocator::sleep`] and [`Allocator::wake`]. It is for
    /// libraries that keep tables of mapped memory, such as network libraries that register it. It
    /// is called neither for segments nor for memory that goes when the allocator itself ends.
    ///
    /// It runs with no lock of the heap held, on the thread that needs the change, so it delays
    /// that thread. It may free, and allocate what free memory serves. What would change mappings,
    /// or wait for such a change to end, returns [`AllocError::Observing`] there, because it would
    /// wait for itself: a request that no free memory serves, [`Allocator::empty_cache`],
    /// [`Allocator::trim_to`], [`crate::Growable::grow_to`], [`Allocator::alloc_exportable`],
    /// [`Allocator::pin_mapping`], [`Allocator::sleep`], [`Allocator::wake`],
    /// [`Allocator::enable_peer_access`]. A [`crate::PrivatePool`] dropped there gives its memory
    /// back later. An access guard on memory of this allocator is refused so, too, while frames are
    /// split. It must not wait for another thread that does one of these. A panic in it is logged
    /// and goes no further: the change still takes place.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use aquifer_allocator::{Allocator, Config, MappingChange};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let mapped = Arc::new(Mutex::new(0));
    /// let seen = mapped.clone();
    /// let registration = allocator.observe_mappings(move |change| match *change {
    ///     MappingChange::Mapped { bytes, .. } => *seen.lock().unwrap() += bytes,
    ///     MappingChange::BeforeUnmap { bytes, .. } => *seen.lock().unwrap() -= bytes,
    ///     _ => {}
    /// });
    /// drop(allocator.alloc_bytes(100 << 20, device.default_stream())?);
    /// assert_eq!(*mapped.lock().unwrap(), 100 << 20);
    /// allocator.empty_cache()?;
    /// assert_eq!(*mapped.lock().unwrap(), 0);
    /// drop(registration); // no more notifications
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn observe_mappings(&self, observe: impl Fn(&MappingChange) + Send + Sync + 'static) -> Registration {
        self.hooks().add_mapping_observer(Arc::new(observe))
    }

    /// Pins the memory behind an allocation, for parties that take note of it: see
    /// [`PinnedMapping`].
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let buffer = allocator.alloc_bytes(3 << 20, device.default_stream())?;
    /// let pinned = allocator.pin_mapping(&buffer)?;
    /// // Two granules: register these with the network card.
    /// assert_eq!(pinned.range().end - pinned.range().start, 4 << 20);
    /// drop(buffer);
    /// allocator.empty_cache()?;
    /// assert_eq!(allocator.memory_reserved(), 4 << 20); // they stay
    /// drop(pinned);
    /// allocator.empty_cache()?;
    /// assert_eq!(allocator.memory_reserved(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`AllocError::WrongAllocator`] or
    /// [`RequestError::WrongDevice`](aquifer_device::RequestError::WrongDevice) for an allocation
    /// of another allocator; [`AllocError::Asleep`] while there is no memory.
    pub fn pin_mapping(&self, allocation: &Allocation) -> Result<PinnedMapping, AllocError> {
        pin::pin_mapping(self, allocation)
    }

    /// Lets the device with this ordinal read and write all memory of the allocator that is mapped,
    /// now and later. Once is enough; again is nothing.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let driver = SimDriver::new(SimConfig::default());
    /// let peer = SimDriver::new(SimConfig::default().ordinal(1));
    /// let device = Device::new(driver.clone());
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let before = allocator.alloc_bytes(5 << 20, device.default_stream())?;
    /// allocator.enable_peer_access(1)?;
    /// let after = allocator.alloc_bytes(50 << 20, device.default_stream())?;
    /// for buffer in [before, after] {
    ///     assert_eq!(driver.mapping_at(buffer.ptr()).unwrap().devices, [0, 1]);
    /// }
    /// # drop(peer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the driver, such as a device that does not exist, or devices that cannot reach
    /// each other: the peer is then not let into later mappings, though it may have access to some
    /// of the present ones. [`AllocError::NotMapped`] where memory comes in segments.
    pub fn enable_peer_access(&self, ordinal: u32) -> Result<(), AllocError> {
        peers::enable_peer_access(self, ordinal)
    }
}
