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

impl Streams {
    /// `count` streams a direction (at least one), at `priority`.
    pub(crate) fn new(device: &Device, count: usize, priority: i32) -> Result<Streams, DeviceError> {
        let lanes = || Lanes::new(device, count.max(1), StreamFlags { non_blocking: true, priority });
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
