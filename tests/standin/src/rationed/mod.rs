//! A driver that gives out less memory than its device has, and whose calls fail on order.
//!
//! It counts what plain allocations and physical memory take, and answers as a device of that size
//! would. A fault strikes before the call does anything. What changes the ration is called under
//! the state's lock, so that a handle or address that the driver gives out again at once is not
//! taken for the old one.
//!
//! Many rations share one device, one after the other: what a caller leaves behind, because its
//! device was lost, goes back to the device when the ration is dropped.

mod driver;
mod unreturned;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::{
    CaptureStatus, Code, DeviceError, DeviceInfo, DevicePtr, Driver, ErrorKind, Operation, PhysicalOptions,
    RawPhysical, RawStream, Result,
};
use aquifer_sim::{Fault, FaultPlan, Preset, SimConfig};
use parking_lot::Mutex;

use unreturned::Unreturned;

/// Addresses can be reserved for so many times the memory of the device, as on the simulated one,
/// which says why.
pub const ADDRESSES_FOR_MEMORY: u64 = 64;

/// Plain allocations take whole pieces of this many bytes from the ration.
const ROUNDING: u64 = 512;

/// A driver whose memory is rationed.
///
/// ```
/// use aquifer_device::Driver;
/// use aquifer_sim::{SimConfig, SimDriver};
/// use aquifer_standin::Rationed;
/// let large = SimDriver::new(SimConfig::new(1 << 30));
/// let small = Rationed::new(large, &SimConfig::new(4 << 20));
/// let taken = small.alloc(3 << 20)?;
/// assert!(small.alloc(2 << 20).unwrap_err().is_out_of_memory());
/// small.free(taken)?;
/// assert_eq!(small.memory_info()?.free, 4 << 20);
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Rationed {
    gpu: Arc<dyn Driver>,
    info: DeviceInfo,
    /// Whether its physical memory can be made fit for RDMA, and be exported, as far as that
    /// depends on the configuration.
    rdma: bool,
    export: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    plain: HashMap<DevicePtr, u64>,
    /// Numbers of physical memory that was not released. A driver may give a handle out again once
    /// its memory is released, even while that is still mapped, so only numbers identify memory.
    handles: HashMap<RawPhysical, u64>,
    physical: HashMap<u64, Physical>,
    created: u64,
    mapped: BTreeMap<DevicePtr, RationedMapping>,
    used: u64,
    reserved: u64,
    other: u64,
    calls: u64,
    faults: FaultPlan,
    lost: Option<Code>,
    unreturned: Unreturned,
}

/// A mapping of rationed memory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RationedMapping {
    /// Its length in bytes.
    pub bytes: u64,
    /// What the memory was created for.
    pub options: PhysicalOptions,
    /// Ordinals of the devices that were given access, ascending.
    pub devices: Vec<u32>,
    physical: u64,
}

#[derive(Clone, Copy, Debug)]
struct Physical {
    bytes: u64,
    options: PhysicalOptions,
    mappings: u64,
    released: bool,
}

impl Rationed {
    /// The ration, and what the device cannot do, are those of `config`.
    pub fn new(gpu: Arc<dyn Driver>, config: &SimConfig) -> Rationed {
        let mut info = gpu.info().clone();
        info.total_bytes = config.capacity_bytes;
        info.granularity_bytes = info.granularity_bytes.filter(|_| config.vmm);
        let state = State {
            plain: HashMap::new(),
            handles: HashMap::new(),
            physical: HashMap::new(),
            created: 0,
            mapped: BTreeMap::new(),
            used: 0,
            reserved: 0,
            other: config.other_process_bytes,
            calls: 0,
            faults: FaultPlan::new(&config.faults, config.seed),
            lost: None,
            unreturned: Unreturned::default(),
        };
        let rdma = config.vmm && config.preset != Preset::Rtx4090;
        let export = config.vmm && config.export;
        Rationed { gpu, info, rdma, export, state: Mutex::new(state) }
    }

    /// The driver below, which knows no ration.
    pub fn below(&self) -> &dyn Driver {
        &*self.gpu
    }

    /// Waits until work that was enqueued here is done. While a stream captures that can be done
    /// for streams which were made here and do not; then the answer is false, as what went before
    /// on the others may be pending.
    ///
    /// # Errors
    /// Those of the driver below.
    pub fn wait_for_work(&self) -> Result<bool> {
        if self.gpu.synchronize().is_ok() {
            return Ok(true);
        }
        let streams: Vec<RawStream> = self.state.lock().unreturned.streams.iter().copied().collect();
        streams.into_iter().try_for_each(|stream| match self.gpu.capture_status(stream)? {
            CaptureStatus::None => self.gpu.synchronize_stream(stream),
            _ => Ok(()),
        })?;
        Ok(false)
    }

    /// Adds a fault, which counts calls from now on. Calls that take longer have no effect here.
    pub fn inject(&self, fault: Fault) {
        self.state.lock().faults.add(fault);
    }

    /// Removes all faults. A lost device stays lost.
    pub fn clear_faults(&self) {
        self.state.lock().faults.clear();
    }

    /// Calls so far, failed ones included.
    pub fn calls_made(&self) -> u64 {
        self.state.lock().calls
    }

    /// The mapping that holds an address, and where it starts.
    pub fn mapping_at(&self, ptr: DevicePtr) -> Option<(DevicePtr, RationedMapping)> {
        let state = self.state.lock();
        let (&start, mapping) = state.mapped.range(..=ptr).next_back()?;
        start.range(mapping.bytes).contains(&ptr.0).then(|| (start, mapping.clone()))
    }

    /// The part of the ration that another process holds from now on, in bytes.
    pub fn set_other_process_bytes(&self, bytes: u64) {
        self.state.lock().other = bytes;
    }

    /// A call begins: it is counted, and fails where a fault strikes.
    fn enter(&self, operation: Operation) -> Result<&dyn Driver> {
        let mut state = self.state.lock();
        state.calls += 1;
        match state.strike(operation) {
            None => Ok(&*self.gpu),
            Some(code) => Err(DeviceError::new(operation, code).with_detail("injected fault")),
        }
    }

    /// Makes a call that changes nothing about the ration.
    fn call<T>(&self, operation: Operation, make: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<T> {
        make(self.enter(operation)?)
    }

    /// Bytes of the ration that are left.
    fn left(&self, state: &State) -> u64 {
        self.info.total_bytes.saturating_sub(state.other).saturating_sub(state.used)
    }

    /// Takes memory from the ration if the call gives it, and notes what it gave.
    fn take<T: Copy>(
        &self,
        operation: Operation,
        bytes: u64,
        call: impl FnOnce(&dyn Driver) -> Result<T>,
        note: impl FnOnce(&mut State, T),
    ) -> Result<T> {
        let below = self.enter(operation)?;
        let mut state = self.state.lock();
        if bytes > self.left(&state).min(state.faults.bytes_max().saturating_sub(state.used)) {
            return Err(DeviceError::new(operation, Code::OUT_OF_MEMORY).with_detail("beyond the ration"));
        }
        let given = call(below)?;
        state.used += bytes;
        note(&mut state, given);
        Ok(given)
    }

    /// Makes a call that gives memory back, or changes what is known about it, and notes it.
    fn give(
        &self,
        operation: Operation,
        call: impl FnOnce(&dyn Driver) -> Result<()>,
        note: impl FnOnce(&mut State),
    ) -> Result<()> {
        let below = self.enter(operation)?;
        let mut state = self.state.lock();
        call(below)?;
        note(&mut state);
        Ok(())
    }

    /// Makes a call that creates an object, and notes the object in a set.
    fn make<T: Copy + Eq + Hash>(
        &self,
        operation: Operation,
        set: impl FnOnce(&mut Unreturned) -> &mut HashSet<T>,
        call: impl FnOnce(&dyn Driver) -> Result<T>,
    ) -> Result<T> {
        let made = call(self.enter(operation)?)?;
        set(&mut self.state.lock().unreturned).insert(made);
        Ok(made)
    }

    /// Takes memory from the ration for a plain allocation, in whole pieces.
    fn take_plain(
        &self,
        operation: Operation,
        bytes: u64,
        call: impl FnOnce(&dyn Driver) -> Result<DevicePtr>,
    ) -> Result<DevicePtr> {
        let taken = bytes.checked_next_multiple_of(ROUNDING).unwrap_or(u64::MAX);
        self.take(operation, taken, call, |state, ptr| {
            state.plain.insert(ptr, taken);
        })
    }

    /// Makes a call that ends something. It is forgotten before, because the driver may give its
    /// handle out again at once.
    fn end<T: Copy + Eq + Hash>(
        &self,
        operation: Operation,
        set: impl Fn(&mut Unreturned) -> &mut HashSet<T>,
        ended: T,
        call: impl FnOnce(&dyn Driver) -> Result<()>,
    ) -> Result<()> {
        let below = self.enter(operation)?;
        let known = set(&mut self.state.lock().unreturned).remove(&ended);
        call(below).inspect_err(|_| {
            if known {
                set(&mut self.state.lock().unreturned).insert(ended);
            }
        })
    }

    /// Refuses mapping calls where the device is configured not to map.
    fn can_map(&self, operation: Operation) -> Result<()> {
        match self.info.granularity_bytes {
            Some(_) => Ok(()),
            None => Err(DeviceError::new(operation, Code::NOT_SUPPORTED).with_detail("this device cannot map memory")),
        }
    }
}

impl Drop for Rationed {
    fn drop(&mut self) {
        let State { plain, handles, mapped, unreturned, .. } = self.state.get_mut();
        if unreturned.stop(&*self.gpu) {
            let held = handles.drain().map(|(handle, _)| handle);
            let mapped = std::mem::take(mapped).into_iter().map(|(ptr, mapping)| (ptr, mapping.bytes));
            unreturned.give_back(&*self.gpu, plain.drain().map(|(ptr, _)| ptr), mapped, held);
        }
    }
}

impl State {
    /// What a call fails with, if a fault strikes it, or one before lost the device.
    fn strike(&mut self, operation: Operation) -> Option<Code> {
        if self.lost.is_none() {
            let struck = self.faults.strike(operation).code;
            self.lost = struck.filter(|code| code.kind() == ErrorKind::DeviceLost);
            return struck;
        }
        self.lost
    }

    /// A plain allocation is gone.
    fn forget(&mut self, ptr: DevicePtr) {
        self.used -= self.plain.remove(&ptr).unwrap_or(0);
    }

    fn mapped_within(&self, range: Range<u64>) -> Vec<DevicePtr> {
        self.mapped.range(DevicePtr(range.start)..DevicePtr(range.end)).map(|(&at, _)| at).collect()
    }

    /// Physical memory goes when it is released and mapped nowhere.
    fn settle(&mut self, physical: u64) {
        if let Some(&Physical { bytes, mappings: 0, released: true, .. }) = self.physical.get(&physical) {
            self.physical.remove(&physical);
            self.used -= bytes;
        }
    }
}
