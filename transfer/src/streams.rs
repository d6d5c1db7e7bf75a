//! The streams that transfers run on: some for each direction, so that both directions and kernels overlap.

use std::sync::atomic::{AtomicUsize, Ordering};

use aquifer_device::{Device, DeviceError, Stream, StreamFlags};

use crate::counters::Direction;

/// Transfer streams of one device. They do not synchronise with the legacy default stream.
#[derive(Debug)]
pub(crate) struct Streams {
    uploads: Lanes,
    downloads: Lanes,
    on_device: Lanes,
}

/// The streams of one direction, used in turn.
#[derive(Debug)]
struct Lanes {
    streams: Vec<Stream>,
    next: AtomicUsize,
}

/// Most streams of one direction: more than copy engines can use, and few enough for any driver.
const STREAMS_MAX: usize = 32;

impl Streams {
    /// `count` streams a direction (1 to [`STREAMS_MAX`]), at `priority`.
    pub(crate) fn new(device: &Device, count: usize, priority: i32) -> Result<Streams, DeviceError> {
        let lanes = || Lanes::new(device, count.clamp(1, STREAMS_MAX), StreamFlags { non_blocking: true, priority });
        Ok(Streams { uploads: lanes()?, downloads: lanes()?, on_device: lanes()? })
    }

    /// The stream whose turn it is.
    pub(crate) fn next(&self, direction: Direction) -> &Stream {
        match direction {
            Direction::Upload => self.uploads.next(),
            Direction::Download => self.downloads.next(),
            Direction::OnDevice => self.on_device.next(),
        }
    }
}

impl Lanes {
    fn new(device: &Device, count: usize, flags: StreamFlags) -> Result<Lanes, DeviceError> {
        let streams = (0..count).map(|_| device.create_stream_with(flags)).collect::<Result<_, _>>()?;
        Ok(Lanes { streams, next: AtomicUsize::new(0) })
    }

    fn next(&self) -> &Stream {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        &self.streams[turn % self.streams.len()]
    }
}

#[cfg(test)]
mod tests {
    use aquifer_device::sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn any_number_of_streams_may_be_asked_for() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        for (count, made) in [(0, 1), (3, 3), (usize::MAX, STREAMS_MAX)] {
            assert_eq!(Streams::new(&device, count, 0).unwrap().uploads.streams.len(), made);
        }
    }
}
