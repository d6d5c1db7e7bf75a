//! What callers made and did not give back. A device that is shared by many rations, one after the
//! other, must not keep it.

use std::collections::{HashMap, HashSet};

use aquifer_device::{
    CaptureStatus, DevicePtr, Driver, HostPtr, RawEvent, RawGraph, RawModule, RawPhysical, RawStream,
};

/// Everything that is alive and takes no part of the ration.
#[derive(Debug, Default)]
pub(super) struct Unreturned {
    pub(super) streams: HashSet<RawStream>,
    pub(super) events: HashSet<RawEvent>,
    pub(super) graphs: HashSet<RawGraph>,
    pub(super) modules: HashSet<RawModule>,
    pub(super) host: HashSet<HostPtr>,
    pub(super) registered: HashSet<HostPtr>,
    pub(super) reserved: HashMap<DevicePtr, u64>,
    /// Streams on which a capture was begun, and not ended without an error.
    pub(super) capturing: HashSet<RawStream>,
}

impl Unreturned {
    /// Ends captures, and waits for the work of the device. False if that cannot be done, so that
    /// nothing may be freed.
    pub(super) fn stop(&mut self, below: &dyn Driver) -> bool {
        for stream in self.capturing.drain() {
            if below.capture_status(stream).is_ok_and(|status| status != CaptureStatus::None) {
                drop(below.end_capture(stream).map(|graph| below.destroy_graph(graph)));
            }
        }
        below.synchronize().is_ok()
    }

    /// Gives all of it back, with memory that counts towards the ration. Ignores errors.
    pub(super) fn give_back(
        &mut self,
        below: &dyn Driver,
        plain: impl IntoIterator<Item = DevicePtr>,
        mapped: impl IntoIterator<Item = (DevicePtr, u64)>,
        physical: impl IntoIterator<Item = RawPhysical>,
    ) {
        mapped.into_iter().for_each(|(ptr, bytes)| drop(below.unmap(ptr, bytes)));
        physical.into_iter().for_each(|physical| drop(below.release_physical(physical)));
        self.reserved.drain().for_each(|(ptr, bytes)| drop(below.unreserve(ptr, bytes)));
        for ptr in plain {
            // Memory of the driver's pool is given back in a stream's order.
            drop(below.free(ptr).or_else(|_| below.free_async(ptr, RawStream::LEGACY)));
        }
        self.graphs.drain().for_each(|graph| drop(below.destroy_graph(graph)));
        self.events.drain().for_each(|event| drop(below.destroy_event(event)));
        self.streams.drain().for_each(|stream| drop(below.destroy_stream(stream)));
        self.modules.drain().for_each(|module| drop(below.unload_module(module)));
        for ptr in self.host.drain() {
            // SAFETY: users of memory of a driver keep the driver, so the memory is unused; the
            // device was waited for.
            drop(unsafe { below.host_free(ptr) });
        }
        for ptr in self.registered.drain() {
            // SAFETY: as above.
            drop(unsafe { below.host_unregister(ptr) });
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer_device::{Driver, PhysicalOptions, StreamFlags};
    use aquifer_sim::{Fault, SimConfig, SimDriver};

    use crate::Rationed;

    #[test]
    fn objects_not_given_back_on_a_lost_device_go_back_to_the_device_below() {
        const MIB: u64 = 1 << 20;
        let below = SimDriver::new(SimConfig::new(64 * MIB));
        let ration = Rationed::new(below.clone(), &SimConfig::new(32 * MIB));
        let (stream, plain) = (ration.create_stream(StreamFlags::default()).unwrap(), ration.alloc(MIB).unwrap());
        let pooled = ration.alloc_async(MIB, stream).unwrap();
        let place = ration.reserve(8 * MIB, 0).unwrap();
        let [mapped, kept] = [(); 2].map(|()| ration.create_physical(2 * MIB, PhysicalOptions::default()).unwrap());
        ration.map(place, 2 * MIB, mapped).unwrap();
        ration.release_physical(mapped).unwrap();
        let (event, host) = (ration.create_event(false).unwrap(), ration.host_alloc(4096).unwrap());
        ration.memset(plain, 1, MIB, stream).unwrap();
        ration.begin_capture(stream).unwrap();
        assert_eq!(below.memory_info().unwrap().free, 58 * MIB);

        ration.inject(Fault::LostAt { nth: 1 });
        assert!(ration.free(plain).unwrap_err().is_device_lost());
        drop(ration);
        assert_eq!(below.memory_info().unwrap().free, 64 * MIB, "{pooled} {kept:?}");
        assert!(below.destroy_event(event).is_err() && below.destroy_stream(stream).is_err());
        // SAFETY: the memory is gone and unused.
        assert!(unsafe { below.host_free(host) }.is_err());
        let all = below.reserve(64 * 64 * MIB, 0).unwrap();
        below.unreserve(all, 64 * 64 * MIB).unwrap();
        assert_eq!(below.violations(), []);
    }
    /// A driver may give a handle out again while the memory that had it is still mapped.
    #[test]
    fn a_handle_that_is_reused_is_not_the_mapped_memory_that_had_it() {
        const MIB: u64 = 1 << 20;
        let ration = Rationed::new(SimDriver::new(SimConfig::new(64 * MIB)), &SimConfig::new(32 * MIB));
        let free = || ration.memory_info().unwrap().free / MIB;
        let place = ration.reserve(8 * MIB, 0).unwrap();
        let first = ration.create_physical(2 * MIB, PhysicalOptions::default()).unwrap();
        ration.map(place, 2 * MIB, first).unwrap();
        ration.release_physical(first).unwrap();
        let second = ration.create_physical(4 * MIB, PhysicalOptions::default()).unwrap();
        assert_eq!((first, free()), (second, 26), "the simulated driver reuses handles");
        ration.unmap(place, 2 * MIB).unwrap();
        assert_eq!(free(), 28);
        ration.map(place, 4 * MIB, second).unwrap();
        ration.unmap(place, 4 * MIB).unwrap();
        ration.release_physical(second).unwrap();
        assert_eq!(free(), 32);
    }
}
