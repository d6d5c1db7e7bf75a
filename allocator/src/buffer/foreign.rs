//! Buffers of memory that another library owns.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use aquifer_device::fork::Mutex;
use aquifer_device::{DevicePtr, RequestError, Stream, Tick};

use super::Buffer;
use crate::allocator::Allocator;
use crate::buffer::storage::{Memory, Storage};
use crate::error::AllocError;

type Release = Box<dyn FnOnce(&[Tick]) + Send>;

/// Memory that another library owns, and how to give it back.
pub(crate) struct Foreign {
    ptr: DevicePtr,
    bytes: u64,
    allocator: Allocator,
    release: Mutex<Option<Release>>,
}

impl Foreign {
    pub(super) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Gives the memory back. Work until these ticks may still use it.
    pub(super) fn release(&self, ticks: &[Tick]) {
        let release = self.release.lock().take();
        if let Some(release) = release {
            release(ticks);
        }
    }
}

/// See [`Allocator::import`].
pub(crate) fn import<T: Copy>(
    allocator: &Allocator,
    ptr: DevicePtr,
    len: usize,
    stream: &Stream,
    release: impl FnOnce(&[Tick]) + Send + 'static,
) -> Result<Buffer<T>, AllocError> {
    let (count, size) = (len as u64, size_of::<T>() as u64);
    let refused = match count.checked_mul(size) {
        Some(bytes) if stream.device_id() == allocator.device().id() => {
            let release: Mutex<Option<Release>> = Mutex::new(Some(Box::new(release)));
            let foreign = Foreign { ptr, bytes, allocator: allocator.kept_open(), release };
            let storage = Arc::new(Storage::new(Memory::Foreign(foreign), stream));
            return Ok(Buffer { storage, start: 0, len, element: PhantomData });
        }
        Some(_) => AllocError::wrong_device("stream", stream.device_id(), allocator.device().id()),
        None => RequestError::LengthOverflow { len: count, size }.into(),
    };
    release(&[]);
    Err(refused)
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Foreign").field("ptr", &self.ptr).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::{Config, StreamAccess as _, read, write};

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
            let mut buffer = memory.import::<u8>(ptr, 4096, &one, release).unwrap();
            one.with([write(&mut buffer)], |raw, [buffer]| raw.fill(buffer.ptr(), 1, buffer.bytes())).unwrap();
            driver.stall(two.raw(), Duration::from_millis(1)).unwrap();
            let mut copy = buffer.like(&two).unwrap();
            two.with([read(&buffer), write(&mut copy)], |raw, [from, to]| raw.copy(to.ptr(), from.ptr(), 4096))
                .unwrap();
            let (again, kept) = (buffer.share(), memory.memory_allocated());
            drop(buffer);
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
        let import = |len, stream: &Stream| {
            let released = released.clone();
            let release = move |ticks: &[Tick]| {
                assert!(ticks.is_empty());
                released.fetch_add(1, Ordering::Relaxed);
            };
            memory.import::<u64>(DevicePtr(4096), len, stream, release).unwrap_err().to_string()
        };
        let wrong = import(1, &other.stream().unwrap());
        assert!(wrong.contains("the stream belongs to"), "{wrong}");
        let long = import(usize::MAX, &device.stream().unwrap());
        assert!(long.contains("more bytes than"), "{long}");
        assert_eq!(released.load(Ordering::Relaxed), 2);
    }
}
