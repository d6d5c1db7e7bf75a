//! Buffers of memory that another library owns.

use aquifer_device::fork::Mutex;
use aquifer_device::{DevicePtr, Tick};

use crate::allocator::Allocator;

pub(super) type Release = Box<dyn FnOnce(&[Tick]) + Send>;

/// Memory that another library owns, and how to give it back.
pub(crate) struct Foreign {
    /// Kept open.
    pub(super) allocator: Allocator,
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    pub(super) release: Mutex<Option<Release>>,
}

impl Foreign {
    /// Zero bytes, without an owner.
    pub(super) fn nothing(allocator: &Allocator) -> Foreign {
        Foreign { allocator: allocator.kept_open(), ptr: DevicePtr(0), bytes: 0, release: Mutex::new(None) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use aquifer_device::{AccessKind, Device};
    use aquifer_sim::{SimConfig, SimDriver};

    use std::sync::Arc;

    use super::*;
    use crate::{AccessGuard, Config};

    #[test]
    fn imported_memory_is_ordered_and_goes_back_with_the_ticks_of_its_uses() {
        let driver = SimDriver::new(SimConfig::parse("64MiB").unwrap());
        let device = Device::new(driver.clone());
        let memory = Allocator::new(&device, Config::default()).unwrap();
        let [one, two] = [(); 2].map(|()| device.stream().unwrap());
        for _ in 0..20 {
            let theirs = memory.alloc_bytes(4096, &one).unwrap();
            let (ptr, owner) = (theirs.ptr(), one.clone());
            let release = move |ticks: &[Tick]| {
                ticks.iter().for_each(|tick| owner.wait_for(tick).unwrap());
                drop(theirs);
            };
            let storage = memory.import(ptr, 4096, &one, release).unwrap();
            let write = AccessGuard::acquire(&one, &[(&storage, AccessKind::Write)]).unwrap();
            one.fill(storage.ptr(), 1, storage.bytes()).unwrap();
            drop(write);
            driver.stall(two.raw(), Duration::from_millis(1)).unwrap();
            let copy = memory.alloc_storage(4096, 1, &two).unwrap();
            let ends = [(&storage, AccessKind::Read), (&copy, AccessKind::Write)];
            let both = AccessGuard::acquire(&two, &ends).unwrap();
            two.copy(copy.ptr(), storage.ptr(), 4096).unwrap();
            drop(both);
            let (again, kept) = (storage.clone(), memory.memory_allocated());
            drop(storage);
            assert_eq!(memory.memory_allocated(), kept);
            drop(again);
        }
        device.synchronize().unwrap();
        assert_eq!(driver.violations(), []);
        assert_eq!(memory.memory_allocated(), 0);
    }

    #[test]
    fn what_is_refused_is_released_at_once() {
        let [device, other] = [(); 2].map(|()| Device::new(SimDriver::new(SimConfig::default())));
        let memory = Allocator::new(&device, Config::default()).unwrap();
        let released = Arc::new(AtomicUsize::new(0));
        let release = {
            let released = released.clone();
            move |ticks: &[Tick]| {
                assert!(ticks.is_empty());
                released.fetch_add(1, Ordering::Relaxed);
            }
        };
        let stream = other.stream().unwrap();
        let wrong = memory.import(DevicePtr(4096), 8, &stream, release).unwrap_err().to_string();
        assert!(wrong.contains("the stream belongs to"), "{wrong}");
        assert_eq!(released.load(Ordering::Relaxed), 1);
    }
}
