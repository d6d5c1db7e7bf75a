//! A simulated GPU: deterministic from a seed, in virtual time, with real data and a race detector.
//!
//! [`SimDriver`] implements [`Driver`] without a GPU; [`open`] opens a device with one. It finds
//! errors that real hardware hides:
//!
//! * **Time is virtual.** Driver calls and work cost as much as on a real card, to an order of
//!   magnitude (see [`Preset`]). The device only makes progress as calls advance the clock. The
//!   same seed and calls give the same run.
//! * **Order is random.** Work that nothing orders finishes in an order that the seed picks.
//! * **Data is real.** Copies, fills and kernels take effect when they finish. Memory that was
//!   never written reads as `0xCD`. Host memory is used for bytes that programs write, not for
//!   those they allocate.
//! * **Every access is checked** in program order, by happens-before between streams, events and
//!   the host. A [`Violation`] names two operations and the missing order, with every seed. The
//!   detector never changes results.
//! * **Misuse of memory is found**: work beyond the bounds of a block, after the block was dropped,
//!   or that reads bytes which nothing has written. `checks=off` ([`SimConfig::checks`]) turns it
//!   off.
//! * **CUDA's rules are enforced**: mappings, captures, default streams, dead handles. Work that
//!   touches memory which is not there loses the device, as on hardware; all errors from then on
//!   say which work, where and why.
//! * **Faults can be injected**: see [`Fault`].
//! * **The device may lag** behind the host by a number of events: see [`Lagging`].
//!
//! Its parts:
//!
//! * **Configuration**: `config`, read from text by `parse`, with costs from `preset` and faults
//!   from `fault`.
//! * **Calls**: `driver` hands them on to `calls` (streams, events, copies, kernels), `vmm`
//!   (memory), `capture`, `conditional` (nodes that run one of several graphs), `peer` (two
//!   devices), `module`; `refused` is the reason for a refusal. `inspect` looks inside without a
//!   call.
//! * **State**: `machine` holds all of it. `address` and `mappings` are the address space, `memory`
//!   and `host` the bytes; `queue`, `objects` and `handle` streams, other objects and their
//!   handles; `interval` a map of ranges.
//! * **Time and order**: `engine` runs `work` in virtual time, in an order picked by `rng`; `race`
//!   finds accesses that nothing orders, by `clock` and by the host's knowledge (`known`), and
//!   reports a `violation`. `checks` finds misuse of memory. `lag` makes the device lag behind.
//!
//! Kernels run while a lock is held, so a [`HostKernel`](aquifer_device::HostKernel) must not call
//! the driver. The legacy stream's implicit waits apply to work, records and waits; synchronising
//! with it on the host covers only work enqueued on it. Stream priorities are accepted and have no
//! effect.
//!
//! Each device has its own address space and virtual clock. Devices wait for each other's events
//! ([`Driver::wait_peer`]) and copy from each other's memory ([`Driver::copy_peer`]). Their race
//! detectors work together, and each reports races in its own device's memory. Access that a
//! mapping gives to others is recorded ([`SimDriver::mapping_at`]), but no kernel can reach another
//! device's memory.
//!
//! ```
//! use aquifer::Device;
//! use aquifer::device::sim::{SimConfig, SimDriver};
//! let driver = SimDriver::new(SimConfig::parse("24GiB,seed=7")?);
//! let device = Device::new(driver.clone());
//! let (one, two, memory) = (device.stream()?, device.stream()?, device.alloc(1 << 20)?);
//! one.fill(memory, 1, 1 << 20)?;
//! two.fill(memory, 2, 1 << 20)?; // nothing orders it after the first
//! let found = driver.violations();
//! assert_eq!(found.len(), 1);
//! println!("{}", found[0]);
//! # Ok::<(), aquifer::Error>(())
//! ```

mod address;
mod calls;
mod capture;
mod checks;
mod clock;
mod conditional;
mod config;
mod driver;
mod engine;
mod fault;
mod graph_memory;
mod handle;
mod host;
mod inspect;
mod interval;
mod known;
mod lag;
mod machine;
mod mappings;
mod memory;
mod module;
mod objects;
mod parse;
mod peer;
mod preset;
mod queue;
mod race;
mod refused;
mod rng;
mod violation;
mod vmm;
mod work;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub use conditional::Conditional;
pub use config::{CAPACITY_BYTES_MAX, SimConfig};
pub use engine::EngineTimes;
pub use fault::{Fault, FaultPlan, Verdict};
pub use inspect::{CaptureRef, LaunchEnd, LiveObjects};
pub use lag::Lagging;
pub use parse::SimConfigError;
pub use preset::Preset;
pub use violation::{BlockRef, DropRef, OpRef, StreamRef, Violation, ViolationKind};
pub use vmm::Mapped;

#[cfg(doc)]
use aquifer_device::Driver;
use aquifer_device::fork::Mutex;
use aquifer_device::internal::may_panic;
use aquifer_device::{CapturingStreams, Device, DeviceInfo, DevicePtr, Operation, RawStream, Result};
use machine::Machine;
use refused::Answer;

/// [`DeviceInfo::kind`] of simulated devices.
pub const KIND: &str = "sim";

/// Opens a new simulated device, described as [`SimConfig::parse`] takes it.
///
/// ```
/// let device = aquifer::open("sim:24GiB,violations=panic")?;
/// assert_eq!(device.info().total_bytes, 24 << 30);
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// # Errors
/// When the text is not understood.
pub fn open(config: &str) -> Result<Device, SimConfigError> {
    Ok(Device::new(SimDriver::new(SimConfig::parse(config)?)))
}

/// A simulated GPU. See the [crate's documentation](crate).
pub struct SimDriver {
    info: DeviceInfo,
    panic_on_violation: bool,
    /// How many violations the program has seen.
    seen: AtomicUsize,
    /// Of all devices made of this.
    capturing: Arc<CapturingStreams>,
    machine: Mutex<Machine>,
}

impl fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDriver").field("info", &self.info).finish_non_exhaustive()
    }
}

impl SimDriver {
    /// A device as `config` describes it. It shares nothing with other devices, but each can be
    /// another one's peer, by its ordinal.
    pub fn new(mut config: SimConfig) -> Arc<SimDriver> {
        config.capacity_bytes = config.capacity_bytes.clamp(1, CAPACITY_BYTES_MAX);
        vmm::note_made(config.ordinal);
        let card = config.card();
        let name = format!("Simulated {} {}", card.name, size_text(config.capacity_bytes));
        let mut info = DeviceInfo::new(KIND, config.ordinal, name, config.capacity_bytes);
        info.is_virtual = true;
        info.granularity_bytes = config.vmm.then_some(mappings::GRANULARITY);
        info.priorities = (0, -5);
        info.compute_capability = card.capability;
        info.shares_host_memory = card.shares_host_memory;
        Arc::new(SimDriver {
            info,
            panic_on_violation: config.panic_on_violation,
            seen: AtomicUsize::new(0),
            capturing: Arc::default(),
            machine: Mutex::new(Machine::new(&config)),
        })
    }

    /// Virtual time since the start, in ns.
    pub fn now_ns(&self) -> u64 {
        self.machine.lock().now
    }

    /// Lets virtual time pass, as a host that computes does. The device makes progress.
    pub fn advance(&self, time: Duration) {
        self.machine.lock().spend(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Keeps a stream from starting later work for `time` from the end of its present work, as long
    /// work would.
    ///
    /// # Errors
    /// When the stream is not live.
    pub fn stall(&self, stream: RawStream, time: Duration) -> Result<()> {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut machine = self.machine.lock();
        machine.stall(stream, time).map_err(|refused| refused.into_error(Operation::QueryStream))
    }

    /// The bytes that another process holds from now on.
    pub fn set_other_process_bytes(&self, bytes: u64) {
        self.machine.lock().memory.set_other(bytes);
    }

    /// The bytes that the driver keeps from now on although nothing uses them, until it is asked to
    /// give them back: in its stream-ordered pool, as another part of the process may leave there,
    /// and for graphs with allocations of their own.
    pub fn set_kept_bytes(&self, pool: u64, graphs: u64) {
        self.machine.lock().memory.kept = memory::Kept { pool, graphs };
    }

    /// Driver calls made so far, failed ones included.
    pub fn calls_made(&self) -> u64 {
        self.machine.lock().calls
    }

    /// Virtual time that driver calls cost the host so far, in ns: without waiting for work and
    /// without injected delays.
    pub fn time_in_calls_ns(&self) -> u64 {
        self.machine.lock().in_calls
    }

    /// The mapping at an address, and the devices that may touch it. Makes no driver call.
    pub fn mapping_at(&self, ptr: DevicePtr) -> Option<Mapped> {
        self.machine.lock().mapping_at(ptr)
    }

    /// Adds a fault; it counts calls from now on.
    pub fn inject(&self, fault: Fault) {
        self.machine.lock().faults.add(fault);
    }

    /// Removes all faults. A lost device stays lost.
    pub fn clear_faults(&self) {
        self.machine.lock().faults.clear();
    }

    /// The violations found and not taken yet, oldest first. At most 4096 are kept.
    pub fn violations(&self) -> Vec<Violation> {
        let found = self.machine.lock().detector.violations().to_vec();
        self.seen.store(found.len(), Ordering::Relaxed);
        found
    }

    /// Takes the violations found, oldest first.
    pub fn take_violations(&self) -> Vec<Violation> {
        self.machine.lock().detector.take()
    }

    /// A driver call without effect: it is counted, takes its time, and fails where a fault
    /// strikes.
    fn ask(&self, operation: Operation) -> Result<()> {
        self.call(operation, |_| Ok(()))
    }

    /// Makes one driver call whose cost does not depend on a size.
    fn call<T>(&self, operation: Operation, call: impl FnOnce(&mut Machine) -> Answer<T>) -> Result<T> {
        self.call_about(operation, 0, call)
    }

    /// Makes one driver call about `bytes` bytes.
    fn call_about<T>(
        &self,
        operation: Operation,
        bytes: u64,
        call: impl FnOnce(&mut Machine) -> Answer<T>,
    ) -> Result<T> {
        self.step(operation, |machine| machine.enter(operation, bytes).and_then(|()| call(machine)))
    }

    /// Makes one step of a driver call, which takes several where two devices take part.
    fn step<T>(&self, operation: Operation, step: impl FnOnce(&mut Machine) -> Answer<T>) -> Result<T> {
        let mut machine = self.machine.lock();
        let found = machine.detector.found;
        let answer = step(&mut machine);
        let mut raised = None;
        if self.panic_on_violation && may_panic() {
            let is_wait = matches!(
                operation,
                Operation::SynchronizeStream | Operation::SynchronizeEvent | Operation::Synchronize
            );
            let latest = machine.detector.violations().last().filter(|_| machine.detector.found > found);
            if is_wait || latest.is_some_and(|latest| latest.kind.is_of_the_call()) {
                raised = machine.detector.raise();
            }
        }
        drop(machine);
        // Without the lock, which callers that catch the panic need again.
        if let Some(violation) = raised {
            panic!("{violation}");
        }
        answer.map_err(|refused| refused.into_error(operation))
    }
}

impl Drop for SimDriver {
    fn drop(&mut self) {
        if self.panic_on_violation
            && may_panic()
            && let Some(violation) = self.machine.get_mut().detector.raise()
        {
            panic!("{violation}");
        }
        let found = self.machine.get_mut().detector.violations();
        if !self.panic_on_violation && found.len() > *self.seen.get_mut() {
            eprintln!(
                "aquifer: {} found {} that the program did not ask about; `violations=panic` or \
                 `Device::assert_no_violations` make a test fail. The first: {}",
                self.info.name,
                if found.len() == 1 { "a violation".to_owned() } else { format!("{} violations", found.len()) },
                found[0],
            );
        }
    }
}

/// A size in a readable unit.
fn size_text(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB")];
    match units.iter().find(|(shift, _)| bytes >= 1 << shift) {
        Some((shift, unit)) if bytes.is_multiple_of(1 << shift) => format!("{} {unit}", bytes >> shift),
        Some((shift, unit)) => format!("{:.2} {unit}", bytes as f64 / (1_u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}
