//! Streams: their identity, where they stand in virtual time, and what they are ordered after.
//!
//! Handles are reused, identities are not. The legacy default stream (identity 0) waits for all blocking streams and
//! they for it; each thread has a blocking default stream of its own.
//!
//! Invariants: a stream's clock holds its own operations; what a destroyed stream left is in `buried`, so that the
//! legacy stream and device-wide waits still cover it.

use std::collections::{BTreeMap, HashMap};
use std::thread::{self, ThreadId};

use super::capture::Membership;
use super::clock::{Clock, StreamKey};
use super::handle::Handles;
use super::race::Epoch;
use super::refused::{Answer, Refused};
use super::violation::{OpRef, StreamRef};
use crate::driver::RawStream;

/// Identity of the legacy default stream.
pub(super) const LEGACY: u32 = 0;

/// A live stream.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) name: StreamRef,
    pub(super) blocking: bool,
    /// When all its work so far is done, in virtual ns.
    pub(super) tail: u64,
    /// What work enqueued next is ordered after.
    pub(super) clock: Clock,
    /// Operations enqueued so far.
    seq: u64,
    /// The state of the legacy stream that it is already ordered after.
    legacy_seen: u64,
    pub(super) capture: Option<Membership>,
}

/// What destroyed streams left behind.
#[derive(Debug, Default)]
struct Buried {
    blocking: Clock,
    blocking_tail: u64,
    all: Clock,
}

/// The streams of a device.
#[derive(Debug)]
pub(super) struct Streams {
    /// Number of the device.
    device: u32,
    live: BTreeMap<u32, Stream>,
    handles: Handles<u32>,
    per_thread: HashMap<ThreadId, u32>,
    next: u32,
    /// Counts what happens on the legacy stream.
    legacy_version: u64,
    buried: Buried,
}

impl Streams {
    pub(super) fn new(device: u32, first_handle: u64) -> Self {
        let mut streams = Streams {
            device,
            live: BTreeMap::new(),
            handles: Handles::new(first_handle),
            per_thread: HashMap::new(),
            next: LEGACY,
            legacy_version: 0,
            buried: Buried::default(),
        };
        streams.add(RawStream::LEGACY, true);
        streams
    }

    fn add(&mut self, handle: RawStream, blocking: bool) -> u32 {
        let id = self.next;
        self.next += 1;
        let stream = Stream {
            name: StreamRef { id, handle },
            blocking,
            tail: 0,
            clock: Clock::default(),
            seq: 0,
            legacy_seen: 0,
            capture: None,
        };
        self.live.insert(id, stream);
        id
    }

    /// Creates a stream with the lowest handle that is free.
    pub(super) fn create(&mut self, blocking: bool) -> RawStream {
        let handle = self.handles.insert(self.next);
        self.add(RawStream(handle), blocking);
        RawStream(handle)
    }

    /// The identity behind a handle; the per-thread stream comes to life at its first use.
    pub(super) fn find(&mut self, handle: RawStream) -> Answer<u32> {
        match handle {
            RawStream(0) | RawStream::LEGACY => Ok(LEGACY),
            RawStream::PER_THREAD => {
                let thread = thread::current().id();
                if let Some(&id) = self.per_thread.get(&thread) {
                    return Ok(id);
                }
                let id = self.add(RawStream::PER_THREAD, true);
                self.per_thread.insert(thread, id);
                Ok(id)
            }
            RawStream(value) => self.handles.get(value).copied().ok_or_else(|| Refused::handle("stream", value)),
        }
    }

    /// Destroys a stream. Its work stays scheduled.
    pub(super) fn destroy(&mut self, handle: RawStream) -> Answer<Stream> {
        if handle.0 <= RawStream::PER_THREAD.0 {
            return Err(Refused::new(crate::error::Code::INVALID_HANDLE, "default streams cannot be destroyed"));
        }
        let id = self.handles.remove(handle.0).ok_or_else(|| Refused::handle("stream", handle.0))?;
        let stream = self.live.remove(&id).ok_or_else(|| Refused::handle("stream", handle.0))?;
        self.buried.all.join(&stream.clock);
        if stream.blocking {
            self.buried.blocking.join(&stream.clock);
            self.buried.blocking_tail = self.buried.blocking_tail.max(stream.tail);
        }
        Ok(stream)
    }

    /// Keeps of destroyed streams only what passes.
    pub(super) fn retain_buried(&mut self, keep: impl Fn(StreamKey, u64) -> bool) {
        self.buried.all.retain(&keep);
        self.buried.blocking.retain(&keep);
    }

    /// A live stream by identity. Identities come from [`Streams::find`] in the same call, so they are live.
    pub(super) fn get(&mut self, id: u32) -> Answer<&mut Stream> {
        self.live.get_mut(&id).ok_or_else(|| Refused::handle("stream", u64::from(id)))
    }

    /// A stream of this device, as clocks name it.
    pub(super) fn key(&self, id: u32) -> StreamKey {
        StreamKey { device: self.device, stream: id }
    }

    /// All live streams.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Stream)> {
        self.live.iter_mut().map(|(&id, stream)| (id, stream))
    }

    /// Orders what comes next on the stream as the legacy stream's rules ask for.
    pub(super) fn arrive(&mut self, id: u32) {
        if id == LEGACY {
            let mut clock = self.buried.blocking.clone();
            let mut tail = self.buried.blocking_tail;
            for stream in self.live.values().filter(|stream| stream.blocking) {
                clock.join(&stream.clock);
                tail = tail.max(stream.tail);
            }
            self.legacy_version += 1;
            if let Some(legacy) = self.live.get_mut(&LEGACY) {
                (legacy.clock, legacy.tail) = (clock, tail);
            }
            return;
        }
        let version = self.legacy_version;
        let behind = |stream: &&mut Stream| stream.blocking && stream.legacy_seen != version;
        if self.live.get_mut(&id).filter(behind).is_none() {
            return;
        }
        let Some((clock, tail)) = self.live.get(&LEGACY).map(|legacy| (legacy.clock.clone(), legacy.tail)) else {
            return;
        };
        if let Some(stream) = self.live.get_mut(&id) {
            stream.clock.join(&clock);
            stream.tail = stream.tail.max(tail);
            stream.legacy_seen = version;
        }
    }

    /// Adds an operation to the stream: its place there.
    pub(super) fn step(&mut self, id: u32, op: OpRef) -> Answer<Epoch> {
        let key = self.key(id);
        let stream = self.get(id)?;
        stream.seq += 1;
        stream.clock.raise(key, stream.seq);
        Ok(Epoch { stream: key, seq: stream.seq, op })
    }

    /// Everything that was enqueued so far, on destroyed streams too, which are forgotten.
    pub(super) fn everything(&mut self) -> Clock {
        let mut clock = std::mem::take(&mut self.buried.all);
        self.buried.blocking.clear();
        for stream in self.live.values() {
            clock.join(&stream.clock);
        }
        clock
    }
}
