//! Streams: their identity, their progress in virtual time, and their clocks.
//!
//! Handles are reused, identities are not. The legacy default stream (identity 0) waits for all
//! blocking streams and they for it; each thread has a blocking default stream of its own.
//!
//! Invariants: a stream's clock holds its own operations; the work of a destroyed stream, or of the
//! default stream of a thread that has ended, is in `ended`, so that the legacy stream and
//! device-wide waits still cover it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::thread::{self, ThreadId};

use aquifer_device::RawStream;
use aquifer_device::internal::RunningThread;

use crate::clock::{OpClock, StreamKey};
use crate::handle::HandleTable;
use crate::objects::Membership;
use crate::race::Epoch;
use crate::refused::{Answer, Refused};
use crate::violation::{OpRef, StreamRef};

/// Identity of the legacy default stream.
pub(crate) const LEGACY: u32 = 0;

/// A live stream.
#[derive(Debug)]
pub(crate) struct StreamState {
    pub(crate) name: StreamRef,
    pub(crate) blocking: bool,
    /// When all its work so far is done, in virtual ns.
    pub(crate) tail: u64,
    /// The operations that later work is ordered after.
    pub(crate) clock: OpClock,
    /// Operations enqueued so far.
    seq: u64,
    /// The state of the legacy stream that it is already ordered after.
    legacy_seen: u64,
    pub(crate) capture: Option<Membership>,
}

/// The default stream of a thread.
#[derive(Debug)]
struct OfThread {
    id: u32,
    thread: RunningThread,
}

/// The work of streams that are gone.
#[derive(Debug, Default)]
struct Ended {
    blocking: OpClock,
    blocking_tail: u64,
    all: OpClock,
}

impl Ended {
    fn add(&mut self, stream: &StreamState) {
        self.all.join(&stream.clock);
        if stream.blocking {
            self.blocking.join(&stream.clock);
            self.blocking_tail = self.blocking_tail.max(stream.tail);
        }
    }
}

/// The streams of a device.
#[derive(Debug)]
pub(crate) struct StreamSet {
    /// Number of the device.
    device: u32,
    live: BTreeMap<u32, StreamState>,
    handles: HandleTable<u32>,
    per_thread: HashMap<ThreadId, OfThread>,
    /// Streams that ended since [`StreamSet::forget_known`].
    gone: usize,
    next: u32,
    /// Counts the arrivals on the legacy stream.
    legacy_version: u64,
    ended: Ended,
}

impl StreamSet {
    pub(crate) fn new(device: u32, first_handle: u64) -> Self {
        let mut streams = StreamSet {
            device,
            live: BTreeMap::new(),
            handles: HandleTable::new(first_handle),
            per_thread: HashMap::new(),
            gone: 0,
            next: LEGACY,
            legacy_version: 0,
            ended: Ended::default(),
        };
        streams.add(RawStream::LEGACY, true);
        streams
    }

    fn add(&mut self, handle: RawStream, blocking: bool) -> u32 {
        let id = self.next;
        self.next += 1;
        let stream = StreamState {
            name: StreamRef { id, handle },
            blocking,
            tail: 0,
            clock: OpClock::default(),
            seq: 0,
            legacy_seen: 0,
            capture: None,
        };
        self.live.insert(id, stream);
        id
    }

    /// Creates a stream with the lowest handle that is free.
    pub(crate) fn create(&mut self, blocking: bool) -> RawStream {
        let handle = self.handles.insert(self.next);
        self.add(RawStream(handle), blocking);
        RawStream(handle)
    }

    /// The identity behind a handle; the per-thread stream is created at its first use.
    pub(crate) fn find(&mut self, handle: RawStream) -> Answer<u32> {
        match handle {
            RawStream(0) | RawStream::LEGACY => Ok(LEGACY),
            RawStream::PER_THREAD => {
                let thread = thread::current().id();
                if let Some(stream) = self.per_thread.get(&thread) {
                    return Ok(stream.id);
                }
                self.remove_those_of_ended_threads();
                let id = self.add(RawStream::PER_THREAD, true);
                self.per_thread.insert(thread, OfThread { id, thread: RunningThread::current() });
                Ok(id)
            }
            RawStream(value) => self.handles.get(value).copied().ok_or_else(|| Refused::handle("stream", value)),
        }
    }

    /// Destroys a stream. Its work stays scheduled.
    pub(crate) fn destroy(&mut self, handle: RawStream) -> Answer<StreamState> {
        if handle.0 <= RawStream::PER_THREAD.0 {
            return Err(Refused::new(aquifer_device::Code::INVALID_HANDLE, "default streams cannot be destroyed"));
        }
        let id = self.handles.remove(handle.0).ok_or_else(|| Refused::handle("stream", handle.0))?;
        let stream = self.live.remove(&id).ok_or_else(|| Refused::handle("stream", handle.0))?;
        self.ended.add(&stream);
        self.gone += 1;
        Ok(stream)
    }

    /// Removes the default streams of threads that have ended, but for those that capture: see
    /// [`StreamSet::of_ended_threads`].
    fn remove_those_of_ended_threads(&mut self) {
        let StreamSet { live, per_thread, ended, gone, .. } = self;
        per_thread.retain(|_, OfThread { id, thread }| {
            let captures = live.get(id).is_some_and(|stream| stream.capture.is_some());
            let goes = thread.has_ended() && !captures;
            if goes && let Some(stream) = live.remove(id) {
                ended.add(&stream);
                *gone += 1;
            }
            !goes
        });
    }

    /// The default streams of threads that have ended and are still live here.
    pub(crate) fn of_ended_threads(&self) -> Vec<u32> {
        let ended = self.per_thread.values().filter(|of_thread| of_thread.thread.has_ended());
        let mut ended: Vec<u32> = ended.map(|of_thread| of_thread.id).collect();
        ended.sort_unstable();
        ended
    }

    /// Whether so many streams are gone that [`StreamSet::forget_known`], which visits all, takes
    /// constant time for each.
    pub(crate) fn are_many_gone(&self) -> bool {
        self.gone > self.live.len()
    }

    /// Removes streams that are gone from all clocks, once the host knows their work complete.
    pub(crate) fn forget_known(&mut self, knows: impl Fn(StreamKey, u64) -> bool) {
        self.gone = 0;
        let keep = |stream, seq| !knows(stream, seq);
        self.ended.all.forget_unless(keep);
        self.ended.blocking.forget_unless(keep);
        let (device, live) = (self.device, self.live.keys().copied().collect::<HashSet<_>>());
        for stream in self.live.values_mut() {
            let is_live = |key: StreamKey| key.device == device && live.contains(&key.stream);
            stream.clock.forget_unless(|key, seq| is_live(key) || keep(key, seq));
        }
    }

    /// A live stream by identity. Identities come from [`StreamSet::find`] in the same call, so
    /// they are live.
    pub(crate) fn get(&mut self, id: u32) -> Answer<&mut StreamState> {
        self.live.get_mut(&id).ok_or_else(|| Refused::handle("stream", u64::from(id)))
    }

    /// A stream of this device, as clocks name it.
    pub(crate) fn key(&self, id: u32) -> StreamKey {
        StreamKey { device: self.device, stream: id }
    }

    /// What names a conditional node in clocks: a stream that never is.
    pub(crate) fn key_of_node(&mut self) -> StreamKey {
        self.next += 1;
        self.key(self.next - 1)
    }

    /// All live streams.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut StreamState)> {
        self.live.iter_mut().map(|(&id, stream)| (id, stream))
    }

    /// Orders the next work of the stream by the rules of the legacy stream.
    pub(crate) fn arrive(&mut self, id: u32) {
        if id == LEGACY {
            let mut clock = self.ended.blocking.clone();
            let mut tail = self.ended.blocking_tail;
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
        let behind = |stream: &&mut StreamState| stream.blocking && stream.legacy_seen != version;
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
    pub(crate) fn step(&mut self, id: u32, op: OpRef) -> Answer<Epoch> {
        let key = self.key(id);
        let stream = self.get(id)?;
        stream.seq += 1;
        stream.clock.raise(key, stream.seq);
        Ok(Epoch { stream: key, seq: stream.seq, op })
    }

    /// Everything that was enqueued so far, on destroyed streams too, which are forgotten.
    pub(crate) fn everything(&mut self) -> OpClock {
        let mut clock = std::mem::take(&mut self.ended.all);
        self.ended.blocking.clear();
        for stream in self.live.values() {
            clock.join(&stream.clock);
        }
        clock
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_device::Operation;

    #[test]
    fn streams_of_ended_threads_are_removed_and_forgotten_once_known_complete() {
        let mut streams = StreamSet::new(0, 0);
        let op =
            OpRef { operation: Some(Operation::Memset), kernel: None, number: 0, stream: None, peer: None, at: None };
        for round in 0..100 {
            let id = thread::scope(|scope| {
                let of_thread = scope.spawn(|| {
                    let id = streams.find(RawStream::PER_THREAD).unwrap();
                    assert_eq!(streams.find(RawStream::PER_THREAD).unwrap(), id, "the same as long as the thread runs");
                    streams.step(id, op).unwrap();
                    id
                });
                of_thread.join().unwrap()
            });
            streams.arrive(LEGACY);
            let legacy = streams.get(LEGACY).unwrap().clock.clone();
            assert_eq!(legacy.get(streams.key(id)), 1, "the legacy stream waits for its work");
            assert!(streams.live.len() <= 2 && legacy.iter().count() <= 18, "after {round}");
            let before = id;
            streams.forget_known(|stream, _| stream.stream < before);
        }
        assert!(streams.everything().iter().count() <= 16);
    }
}
