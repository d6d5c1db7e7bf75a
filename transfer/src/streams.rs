//! The streams that transfers run on: some for each direction, so that both directions and kernels
//! overlap, at each requested priority.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use aquifer_device::fork::Mutex;
use aquifer_device::{Device, DeviceError, Stream, StreamFlags};

use crate::counters::Direction;

/// The transfer streams of one device at all priorities. The first request for a priority creates
/// its streams, which stay.
#[derive(Debug)]
pub(crate) struct Levels {
    device: Device,
    made: Mutex<Vec<Arc<Streams>>>,
}

/// The transfer streams of one device at one priority. They do not synchronise with the legacy
/// default stream.
#[derive(Debug)]
pub(crate) struct Streams {
    priority: i32,
    /// By direction.
    rotations: [Rotation; 3],
}

/// The streams of one direction, used in rotation.
#[derive(Debug)]
struct Rotation {
    streams: [Stream; STREAMS],
    next: AtomicUsize,
}

/// Streams of one direction at one priority, so that a small copy need not wait for a large one.
const STREAMS: usize = 2;

impl Levels {
    /// No streams yet.
    pub(crate) fn new(device: &Device) -> Levels {
        Levels { device: device.for_memory(), made: Mutex::default() }
    }

    /// The streams of the priority that is nearest to this among those that the device has.
    pub(crate) fn at(&self, priority: i32) -> Result<Arc<Streams>, DeviceError> {
        let (least, greatest) = self.device.info().priorities;
        // `clamp` panics on bounds in the wrong order, which a driver may report.
        let priority = priority.clamp(greatest.min(least), greatest.max(least));
        let mut made = self.made.lock();
        if let Some(streams) = made.iter().find(|streams| streams.priority == priority) {
            return Ok(streams.clone());
        }
        let streams = Arc::new(Streams::new(&self.device, priority)?);
        made.push(streams.clone());
        Ok(streams)
    }
}

impl Streams {
    fn new(device: &Device, priority: i32) -> Result<Streams, DeviceError> {
        let flags = StreamFlags { non_blocking: true, priority };
        let rotation = || -> Result<Rotation, DeviceError> {
            let [one, two] = [(); STREAMS].map(|()| device.stream_with(flags));
            Ok(Rotation { streams: [one?, two?], next: AtomicUsize::new(0) })
        };
        Ok(Streams { priority, rotations: [rotation()?, rotation()?, rotation()?] })
    }

    /// Their priority; lower is more urgent.
    pub(crate) fn priority(&self) -> i32 {
        self.priority
    }

    /// The next stream in rotation.
    pub(crate) fn next(&self, direction: Direction) -> &Stream {
        let Rotation { streams, next } = &self.rotations[direction as usize];
        &streams[next.fetch_add(1, Ordering::Relaxed) % STREAMS]
    }
}

#[cfg(test)]
mod tests {
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;

    /// As many sets as the device has priorities, each made once, whatever is asked for.
    #[test]
    fn each_priority_of_the_device_has_its_streams() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let (least, greatest) = device.info().priorities;
        assert!(greatest < least);
        let levels = Levels::new(&device);
        let all: Vec<_> =
            (greatest - 3..least + 3).chain([i32::MIN, i32::MAX]).map(|n| levels.at(n).unwrap()).collect();
        let mut priorities: Vec<i32> = levels.made.lock().iter().map(|streams| streams.priority).collect();
        priorities.sort_unstable();
        assert_eq!(priorities, (greatest..=least).collect::<Vec<_>>());
        assert!(Arc::ptr_eq(&all[0], &all[1]) && all.last().unwrap().priority() == least);
    }
}
