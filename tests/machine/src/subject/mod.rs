//! The device that a test runs on, and control over it behind the allocator's back.
//!
//! The same tests run on several drivers. The environment variable `AQUIFER_TEST_DRIVER` says
//! which:
//!
//! | value | driver | control over the device |
//! | --- | --- | --- |
//! | `sim`, or none | the simulated device itself | all |
//! | `standin` | the CUDA driver, on the simulated device that [`aquifer_standin`] puts behind CUDA's C ABI | all but lag |
//! | `cuda` | the CUDA driver on the first real GPU | its memory is rationed, calls fail on order; no race detector |
//! | `rationed` | a dry run of `cuda`, on one large device of the stand-in that all tests share | as `cuda` |

mod hardware;
mod simulated;
mod standin;

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use aquifer_device::{Device, DevicePtr, Driver, PhysicalOptions, Result, Stream};
use aquifer_sim::{Fault, Lagging, SimConfig, SimDriver};
use aquifer_standin::ADDRESSES_FOR_MEMORY;

/// The variable that says which driver tests run on.
pub const DRIVER: &str = "AQUIFER_TEST_DRIVER";

/// Which driver tests run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Simulated,
    Standin,
    Hardware,
    /// As on hardware, without any.
    Rationed,
}

impl Kind {
    fn chosen() -> Kind {
        *CHOSEN.get_or_init(|| std::env::var(DRIVER).map_or(Kind::Simulated, |name| Kind::named(&name)))
    }

    fn named(name: &str) -> Kind {
        match name {
            "sim" => Kind::Simulated,
            "standin" => Kind::Standin,
            "cuda" => Kind::Hardware,
            "rationed" => Kind::Rationed,
            other => panic!("{DRIVER}={other}; known are sim, standin, cuda and rationed"),
        }
    }

    /// Whether all tests share a device, of which each gets a ration.
    fn is_shared(self) -> bool {
        matches!(self, Kind::Hardware | Kind::Rationed)
    }
}

static CHOSEN: OnceLock<Kind> = OnceLock::new();

/// What a test does to a device, or asks of it, that no program can.
trait Controls: fmt::Debug + Send + Sync {
    /// What the race detector found so far.
    fn violations(&self) -> Vec<String>;
    /// Adds a fault, which counts calls from now on.
    fn inject(&self, fault: Fault);
    /// Removes all faults. A lost device stays lost.
    fn clear_faults(&self);
    /// Calls that reached the device, failed ones included.
    fn calls_made(&self) -> u64;
    /// The time by the device's clock, in ns.
    fn now_ns(&self) -> u64;
    /// Lets time pass, as a host that computes does.
    fn advance(&self, time: Duration);
    /// Keeps a stream busy for so long from the end of its present work.
    fn stall(&self, stream: &Stream, time: Duration) -> Result<()>;
    /// How many streams, events, captures, graphs, modules and pieces of pinned memory were
    /// made and not given back, where that is known.
    fn live_objects(&self) -> Option<u64> {
        None
    }
    /// Another process holds so many bytes of the device from now on.
    fn set_other_process_bytes(&self, bytes: u64);
    /// What is mapped at an address.
    fn mapping_at(&self, ptr: DevicePtr) -> Option<Mapped>;
}

/// Memory mapped at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Where the mapping starts.
    pub ptr: DevicePtr,
    /// Its length in bytes.
    pub bytes: u64,
    /// What the memory was created for.
    pub options: PhysicalOptions,
    /// Ordinals of the devices that may touch it, ascending.
    pub devices: Vec<u32>,
}

/// A device under test: its driver, which outlives every [`Device`] made of it, and control over
/// it.
#[derive(Clone, Debug)]
pub struct Subject {
    pub(crate) driver: Arc<dyn Driver>,
    controls: Arc<dyn Controls>,
    /// The simulated device, where tests run on that itself.
    pub(crate) simulator: Option<Arc<SimDriver>>,
}

impl Subject {
    /// A device of its own, with so many bytes of memory.
    pub fn new(capacity: u64) -> Subject {
        Subject::open(&SimConfig::new(capacity))
    }

    /// A device of its own that is like `config`.
    pub fn open(config: &SimConfig) -> Subject {
        match Kind::chosen() {
            Kind::Simulated => simulated::open(config),
            Kind::Standin => standin::open(config),
            Kind::Hardware | Kind::Rationed => hardware::open(config),
        }
    }

    /// Chooses the driver for this process, before a device is opened: `sim`, `standin`, `cuda` or
    /// `rationed`.
    pub fn choose(driver: &str) {
        CHOSEN.get_or_init(|| Kind::named(driver));
    }

    /// Whether the tests of this process share one device.
    pub fn is_shared() -> bool {
        Kind::chosen().is_shared()
    }

    /// Whether tests run on the simulated device itself, whose time they can read and which they
    /// can make lag.
    pub fn is_simulated() -> bool {
        Kind::chosen() == Kind::Simulated
    }

    /// Whether each test has a simulated device of its own behind the driver. It has a race
    /// detector, stalls and pauses take exactly their time, a lost device loses its work, the
    /// handle of a destroyed stream goes to the next new one, and wrong calls fail in known ways.
    /// On a GPU, and in a dry run of one, none of this is certain.
    pub fn has_simulated_device() -> bool {
        !Kind::chosen().is_shared()
    }

    /// How many of `n` repetitions or programs to run: all on the simulated device. The stand-in
    /// runs a fourth, because it repeats what the simulated device checked. A GPU runs one in
    /// thirty, so that all tests together take a few minutes there.
    pub fn share(n: u64) -> u64 {
        match Kind::chosen() {
            Kind::Simulated => n,
            Kind::Standin => n.div_ceil(4),
            Kind::Hardware | Kind::Rationed => n.div_ceil(30),
        }
    }

    /// A device that lags behind the program, which only the simulated device itself can be made
    /// to.
    pub fn lagging(config: &SimConfig, lag: u64) -> (Subject, Arc<Lagging>) {
        simulated::lagging(config, lag)
    }

    /// Other devices that can be given access to this one's memory, with ordinals above 0 and of
    /// their own. None on a GPU: tests count on one.
    pub fn peers(count: u32) -> Vec<Subject> {
        match Kind::chosen() {
            kind if kind.is_shared() => Vec::new(),
            _ => (1..=count).map(|ordinal| Subject::open(&SimConfig::new(1 << 20).ordinal(ordinal))).collect(),
        }
    }

    /// Its ordinal among the devices of its kind.
    pub fn ordinal(&self) -> u32 {
        self.driver.info().ordinal
    }

    /// A handle of the device with a timeline of its own.
    pub fn device(&self) -> Device {
        Device::new(self.driver.clone())
    }

    /// Bytes free on the device.
    pub fn free(&self) -> u64 {
        self.driver.memory_info().unwrap_or_else(|error| panic!("{error}")).free
    }

    /// Asserts that all memory is free after the last handle of the device and its allocators was
    /// dropped. The next thread that drops an allocator closes the device. That may be a thread of
    /// another test, so this waits for up to ten seconds.
    pub fn assert_all_free(&self) {
        let total = self.driver.memory_info().unwrap_or_else(|error| panic!("{error}")).total;
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.free() != total && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(self.free(), total);
    }

    /// What the race detector found so far.
    pub fn violations(&self) -> Vec<String> {
        self.controls.violations()
    }

    /// Panics if the race detector found anything.
    pub fn assert_no_violation(&self) {
        let found = self.violations();
        assert!(found.is_empty(), "the race detector found: {}", found.join("\n"));
    }

    /// How many bytes of addresses can be reserved: [`ADDRESSES_FOR_MEMORY`] times the device's
    /// memory. `None` where memory cannot be mapped. A GPU has more of them.
    pub fn addresses(&self) -> Option<u64> {
        let info = self.driver.info();
        Some(ADDRESSES_FOR_MEMORY * info.total_bytes.next_multiple_of(info.granularity_bytes?))
    }

    /// Panics unless all of the device's addresses can be reserved.
    pub fn assert_no_reservation(&self) {
        let Some(bytes) = self.addresses() else { return };
        let ptr = self.driver.reserve(bytes, 0).unwrap_or_else(|error| panic!("addresses are missing: {error}"));
        self.driver.unreserve(ptr, bytes).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Adds a fault, which counts calls from now on.
    pub fn inject(&self, fault: Fault) {
        self.controls.inject(fault);
    }

    /// Removes all faults. A lost device stays lost.
    pub fn clear_faults(&self) {
        self.controls.clear_faults();
    }

    /// Calls that reached the device, failed ones included.
    pub fn calls_made(&self) -> u64 {
        self.controls.calls_made()
    }

    /// The time by the device's clock, in ns.
    pub fn now_ns(&self) -> u64 {
        self.controls.now_ns()
    }

    /// How many streams, events, captures, graphs, modules and pieces of pinned memory were
    /// made and not given back, where that is known.
    pub fn live_objects(&self) -> Option<u64> {
        self.controls.live_objects()
    }

    /// Lets time pass, as a host that computes does. The device makes progress.
    pub fn advance(&self, time: Duration) {
        self.controls.advance(time);
    }

    /// Keeps a stream busy for `time` from the end of its present work, as long work would.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn stall(&self, stream: &Stream, time: Duration) -> Result<()> {
        self.controls.stall(stream, time)
    }

    /// What is mapped at an address.
    pub fn mapping_at(&self, ptr: DevicePtr) -> Option<Mapped> {
        self.controls.mapping_at(ptr)
    }

    /// Whether all of a range is mapped.
    pub fn is_mapped(&self, range: Range<u64>) -> bool {
        let mut at = range.start;
        while let Some(mapped) = (at < range.end).then(|| self.mapping_at(DevicePtr(at))).flatten() {
            at = mapped.ptr.0 + mapped.bytes;
        }
        at >= range.end
    }

    /// The bytes that another process holds from now on.
    pub fn set_other_process_bytes(&self, bytes: u64) {
        self.controls.set_other_process_bytes(bytes);
    }
}

impl Deref for Subject {
    type Target = dyn Driver;

    fn deref(&self) -> &(dyn Driver + 'static) {
        &*self.driver
    }
}
