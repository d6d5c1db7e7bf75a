//! Memory calls: plain allocations, the driver's pool, and physical memory mapped at reserved
//! addresses.
//!
//! The rules of mapping are enforced as the driver has them: whole handles, whole mappings, no
//! access before it is given, and no waiting for work. A handle may be mapped at several addresses.
//! Invariant: a piece of physical memory lives while its handle or one of its mappings does.

use std::collections::BTreeSet;

use aquifer_device::fork::Mutex;
use aquifer_device::{Code, DevicePtr, MemoryInfo, Operation, PhysicalOptions, PoolUsage, RawPhysical, RawStream};

use crate::machine::Machine;
use crate::mappings::GRANULARITY;
use crate::memory::StoreId;
use crate::objects::Physical;
use crate::race::{Space, host_has_not_waited};
use crate::refused::{Answer, Refused};
use crate::violation::{Violation, ViolationKind};
use crate::work::Body;

/// Plain allocations take memory in multiples of this.
const ROUNDING: u64 = 512;

/// Ordinals of the devices that the process has made so far. One whose driver is dropped stays, as
/// a GPU does that no handle has open, so that access given to it stays valid.
static MADE: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Notes that there is a device with this ordinal.
pub(crate) fn note_made(ordinal: u32) {
    MADE.lock().insert(ordinal);
}

/// Refuses an ordinal that no device of the process has.
pub(crate) fn check_made(ordinal: u32) -> Answer<()> {
    if MADE.lock().contains(&ordinal) {
        return Ok(());
    }
    Err(Refused::new(Code::INVALID_DEVICE, format!("there is no simulated device {ordinal}")))
}

/// Physical memory mapped at an address, as tests want to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
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

impl Machine {
    /// Refuses mapping calls where the device is configured not to map.
    fn check_can_map(&self) -> Answer<()> {
        if self.vmm { Ok(()) } else { Err(Refused::new(Code::NOT_SUPPORTED, "this device cannot map memory")) }
    }

    pub(crate) fn can_rdma(&self) -> bool {
        self.vmm && self.engine.card().rdma
    }

    pub(crate) fn memory_info(&mut self) -> Answer<MemoryInfo> {
        Ok(MemoryInfo { free: self.memory.free(), total: self.memory.total() })
    }

    pub(crate) fn pool_usage(&mut self) -> Answer<PoolUsage> {
        let reserved = self.pool.reserved.saturating_add(self.memory.kept.pool);
        let graphs = self.memory.kept.graphs.saturating_add(self.address.bytes_of_graphs());
        Ok(PoolUsage { reserved, reserved_peak: self.pool.reserved_peak.max(reserved), graphs, ..self.pool })
    }

    pub(crate) fn trim_pool(&mut self, keep: u64) -> Answer<()> {
        let kept = &mut self.memory.kept.pool;
        *kept = keep.saturating_sub(self.pool.used).min(*kept);
        Ok(())
    }

    pub(crate) fn trim_graph_memory(&mut self) -> Answer<()> {
        self.memory.kept.graphs = 0;
        Ok(())
    }

    /// Memory for an allocation; when it runs short, pending frees of the driver's pool are waited
    /// for.
    fn create_store(&mut self, bytes: u64) -> Answer<StoreId> {
        loop {
            match self.memory.create(bytes, self.faults.bytes_max()) {
                Ok(store) => return Ok(store),
                Err(refused) if bytes > self.memory.total() => return Err(refused),
                Err(refused) => {
                    if !self.wait_for_pool_free()? {
                        return Err(self.starve(bytes, refused));
                    }
                }
            }
        }
    }

    /// The answer to a request that found too little memory: where that is the host's, the system
    /// ends the process, unless the device never had as much.
    fn starve(&mut self, bytes: u64, refused: Refused) -> Refused {
        let is_host_out = self.engine.card().shares_host_memory && bytes > self.memory.free();
        if !is_host_out || bytes > self.memory.total() {
            return refused;
        }
        self.lose(Code::LAUNCH_FAILED, &format!("the host ran out of memory, which ends a process: {}", refused.detail))
    }

    pub(crate) fn allocate(&mut self, bytes: u64, pool: bool) -> Answer<u64> {
        if bytes == 0 {
            return Err(Refused::value("0 bytes asked for"));
        }
        let out_of_memory = || Refused::new(Code::OUT_OF_MEMORY, format!("{bytes} bytes asked for"));
        let store = self.create_store(bytes.checked_next_multiple_of(ROUNDING).ok_or_else(out_of_memory)?)?;
        let Some(ptr) = self.address.allocate(bytes, store, pool) else {
            self.memory.destroy(store);
            return Err(out_of_memory());
        };
        self.detector.device.clear(ptr..ptr + bytes);
        Ok(ptr)
    }

    pub(crate) fn alloc(&mut self, bytes: u64) -> Answer<DevicePtr> {
        self.allocate(bytes, false).map(DevicePtr)
    }

    pub(crate) fn free(&mut self, ptr: DevicePtr) -> Answer<()> {
        let range = ptr.range(self.address.allocation(ptr.0)?.bytes);
        self.forbid_device_wait()?;
        self.wait_for_all()?;
        let op = self.op_ref(None, Operation::Free, None);
        // Work of other devices was not waited for.
        self.detector.check_known(Space::Device, range, false, ViolationKind::PendingWork, op);
        self.drop_allocation(ptr.0, op);
        Ok(())
    }

    pub(crate) fn alloc_async(&mut self, bytes: u64, stream: RawStream) -> Answer<DevicePtr> {
        let id = self.streams.find(stream)?;
        if let Some(ptr) = self.alloc_in_graph(id, bytes)? {
            return Ok(ptr);
        }
        let ptr = self.allocate(bytes, true)?;
        self.pool_holds(self.pool.used.saturating_add(bytes));
        self.submit(id, Body::PoolAlloc { memory: ptr..ptr + bytes })?;
        Ok(DevicePtr(ptr))
    }

    pub(crate) fn free_async(&mut self, ptr: DevicePtr, stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        if self.free_in_graph(id, ptr)? {
            return Ok(());
        }
        let allocation = self.address.allocation(ptr.0)?;
        if !allocation.pool {
            return Err(Refused::value(format!(
                "{ptr} was not allocated from the driver's pool; free it with cuMemFree"
            )));
        }
        let memory = ptr.range(allocation.bytes);
        if let Some(submitted) = self.submit(id, Body::PoolFree { memory })? {
            self.address.allocation(ptr.0)?.freed = Some(submitted.op);
        }
        Ok(())
    }

    pub(crate) fn reserve(&mut self, bytes: u64, alignment: u64) -> Answer<DevicePtr> {
        self.check_can_map()?;
        self.address.reserve(bytes, alignment).map(DevicePtr)
    }

    pub(crate) fn unreserve(&mut self, ptr: DevicePtr, bytes: u64) -> Answer<()> {
        self.check_can_map()?;
        let op = self.op_ref(None, Operation::Unreserve, None);
        self.address.unreserve(ptr.0, bytes, op)?;
        self.checks().inspect(|checks| checks.removed(ptr.range(bytes)));
        Ok(())
    }

    pub(crate) fn create_physical(&mut self, bytes: u64, options: PhysicalOptions) -> Answer<RawPhysical> {
        self.check_can_map()?;
        if options.rdma && !self.can_rdma() {
            return Err(Refused::new(Code::NOT_SUPPORTED, "this device has no memory for RDMA"));
        }
        if options.exportable.is_some() && !self.export {
            return Err(Refused::new(Code::NOT_SUPPORTED, "this device has no memory that can be exported"));
        }
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(Refused::value(format!("{bytes} is not a positive multiple of {GRANULARITY} bytes")));
        }
        let store =
            self.memory.create(bytes, self.faults.bytes_max()).map_err(|refused| self.starve(bytes, refused))?;
        let (mapped_at, unfinished) = (Vec::new(), Vec::new());
        let physical = Physical { bytes, options, store, mapped_at, has_handle: true, unfinished };
        let number = self.physicals.live.insert(physical);
        Ok(RawPhysical(self.physicals.handles.insert(number)))
    }

    pub(crate) fn release_physical(&mut self, handle: RawPhysical) -> Answer<()> {
        self.check_can_map()?;
        let (number, _) = self.physicals.get(handle)?;
        self.physicals.handles.remove(handle.0);
        if let Some(physical) = self.physicals.live.get_mut(number) {
            physical.has_handle = false;
            if physical.mapped_at.is_empty() {
                self.end_physical(number);
            }
        }
        Ok(())
    }

    /// Gives physical memory back that has neither handle nor mapping.
    fn end_physical(&mut self, number: u64) {
        let Some(physical) = self.physicals.live.remove(number) else { return };
        self.memory.destroy(physical.store);
        let op = self.op_ref(None, Operation::ReleasePhysical, None);
        for epoch in physical.unfinished {
            if !self.detector.known.knows(epoch.stream, epoch.seq) {
                let (kind, range) = (ViolationKind::PendingWork, 0..physical.bytes);
                let missing = host_has_not_waited(&epoch, &op);
                let first = Some(epoch.op);
                self.detector.report(Violation { kind, first, second: op, range, missing, block: None });
            }
        }
    }

    pub(crate) fn map(&mut self, ptr: DevicePtr, bytes: u64, handle: RawPhysical) -> Answer<()> {
        self.check_can_map()?;
        let (number, physical) = self.physicals.get(handle)?;
        if physical.bytes != bytes {
            return Err(Refused::value(format!("{bytes} bytes are not all {} bytes of the memory", physical.bytes)));
        }
        self.address.mappings.map(ptr.0, bytes, number, physical.store)?;
        self.physicals.note_mapped(number, ptr.0);
        Ok(())
    }

    /// What is mapped at `ptr`.
    pub(crate) fn mapping_at(&self, ptr: DevicePtr) -> Option<Mapped> {
        let mapping = self.address.mappings.at(ptr.0)?;
        let physical = self.physicals.live.get(mapping.physical)?;
        Some(Mapped {
            ptr: DevicePtr(mapping.start),
            bytes: mapping.bytes,
            options: physical.options,
            devices: mapping.devices.clone(),
        })
    }

    /// Lets the time pass that a call takes for the mappings it covers, beyond its fixed cost.
    fn spend_on_mappings(&mut self, operation: Operation, mappings: u64) -> Answer<()> {
        let ns = self.engine.card().mappings_cost_ns(operation, mappings);
        self.spend_in_call(ns)
    }

    pub(crate) fn unmap(&mut self, ptr: DevicePtr, bytes: u64) -> Answer<()> {
        self.check_can_map()?;
        let tiles = self.address.mappings.count_tiles(ptr.0, bytes)?;
        self.spend_on_mappings(Operation::Unmap, tiles)?;
        let op = self.op_ref(None, Operation::Unmap, None);
        let all = ptr.range(bytes);
        // Usually none of it is in use any more.
        let untouched = self.detector.device.is_untouched(all.clone());
        let mut at = all.start;
        while at < all.end
            && let Some(mapping) = self.address.mappings.unmap(at)
        {
            let range = at..mapping.end();
            at = range.end;
            let mut unfinished = Vec::new();
            if !untouched {
                let kind = ViolationKind::PendingWork;
                unfinished = self.detector.check_known(Space::Device, range.clone(), false, kind, op);
                self.detector.device.clear(range);
            }
            let Some(physical) = self.physicals.note_unmapped(mapping.physical, mapping.start) else { continue };
            physical.unfinished.extend(unfinished);
            if !physical.has_handle && physical.mapped_at.is_empty() {
                self.end_physical(mapping.physical);
            }
        }
        self.address.gone.insert(all, op);
        Ok(())
    }

    pub(crate) fn can_access_peer(&mut self, ordinal: u32) -> Answer<bool> {
        check_made(ordinal).map(|()| ordinal != self.ordinal)
    }

    pub(crate) fn set_access(&mut self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Answer<()> {
        self.check_can_map()?;
        devices.iter().try_for_each(|&ordinal| check_made(ordinal))?;
        if devices.is_empty() {
            return Err(Refused::value("no devices given"));
        }
        let tiles = self.address.mappings.count_tiles(ptr.0, bytes)?;
        self.spend_on_mappings(Operation::SetAccess, tiles)?;
        self.address.mappings.give_access(ptr.range(bytes), devices);
        Ok(())
    }
}
