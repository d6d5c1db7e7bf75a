//! Streams: their identity, where they stand in virtual time, and what they are ordered after.
//!
//! Handles are reused, identities are not. The legacy default stream (identity 0) waits for all
//! blocking streams and they for it; each thread has a blocking default stream of its own.
//!
//! Invariants: a stream's clock holds its own operations; what a destroyed stream left, or the
//! default stream of a thread that has ended, is in `ended`, so that the legacy stream and
//! device-wide waits still cover it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use super::clock::{Clock, StreamKey};
use super::handle::Handles;
use super::objects::Membership;
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

thread_local! {
    /// Dropped when the thread ends.
    static RUNS: Arc<()> = Arc::default();
}

/// The default stream of a thread.
#[derive(Debug)]
struct OfThread {
    id: u32,
    runs: Weak<()>,
}

/// What streams that are gone left behind.
#[derive(Debug, Default)]
struct Ended {
    blocking: Clock,
    blocking_tail: u64,
    all: Clock,
}

impl Ended {
    fn add(&mut self, stream: &Stream) {
        self.all.join(&stream.clock);
        if stream.blocking {
            self.blocking.join(&stream.clock);
            self.blocking_tail = self.blocking_tail.max(stream.tail);
        }
    }
}

/// The streams of a device.
#[derive(Debug)]
pub(super) struct Streams {
    /// Number of the device.
    device: u32,
    live: BTreeMap<u32, Stream>,
    handles: Handles<u32>,
    per_thread: HashMap<ThreadId, OfThread>,
    /// Streams that ended since [`Streams::forget_known`].
    gone: usize,
    next: u32,
    /// Counts what happens on the legacy stream.
    legacy_version: u64,
    ended: Ended,
}

impl Streams {
    pub(super) fn new(device: u32, first_handle: u64) -> Self {
        let mut streams = Streams {
            device,
            live: BTreeMap::new(),
            handles: Handles::new(first_handle),
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

    /// The identity behind a handle; the per-thread stream is created at its first use.
    pub(super) fn find(&mut self, handle: RawStream) -> Answer<u32> {
        match handle {
            RawStream(0) | RawStream::LEGACY => Ok(LEGACY),
            RawStream::PER_THREAD => {
                let thread = thread::current().id();
                if let Some(stream) = self.per_thread.get(&thread) {
                    return Ok(stream.id);
                }
                self.bury_those_of_ended_threads();
                let id = self.add(RawStream::PER_THREAD, true);
                self.per_thread
                    .insert(thread, OfThread { id, runs: RUNS.try_with(Arc::downgrade).unwrap_or_default() });
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
        self.ended.add(&stream);
        self.gone += 1;
        Ok(stream)
    }

    /// Those that capture come when that is over: see [`Streams::of_ended_threads`].
    fn bury_those_of_ended_threads(&mut self) {
        let Streams { live, per_thread, ended, gone, .. } = self;
        per_thread.retain(|_, OfThread { id, runs }| {
            let captures = live.get(id).is_some_and(|stream| stream.capture.is_some());
            let goes = runs.strong_count() == 0 && !captures;
            if goes && let Some(stream) = live.remove(id) {
                ended.add(&stream);
                *gone += 1;
            }
            !goes
        });
    }

    /// The default streams of threads that have ended and are still live here.
    pub(super) fn of_ended_threads(&self) -> Vec<u32> {
        let ended = self.per_thread.values().filter(|of_thread| of_thread.runs.strong_count() == 0);
        ended.map(|of_thread| of_thread.id).collect()
    }

    /// Whether so many streams are gone that [`Streams::forget_known`], which visits all, takes
    /// constant time for each.
    pub(super) fn are_many_gone(&self) -> bool {
        self.gone > self.live.len()
    }

    /// Forgets what every stream is ordered after by the host's knowledge alone, of streams that
    /// are gone.
    pub(super) fn forget_known(&mut self, knows: impl Fn(StreamKey, u64) -> bool) {
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

    /// A live stream by identity. Identities come from [`Streams::find`] in the same call, so they
    /// are live.
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
    use crate::error::Operation;

    #[test]
    fn streams_of_threads_that_have_ended_are_buried_and_forgotten_once_known_complete() {
        let mut streams = Streams::new(0, 0);
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
            assert_eq!(legacy.get(streams.key(id)), 1, "the legacy stream waits for what it left");
            assert!(streams.live.len() <= 2 && legacy.iter().count() <= 18, "after {round}");
            let before = id;
            streams.forget_known(|stream, _| stream.stream < before);
        }
        assert!(streams.everything().iter().count() <= 16);
    }

    #[test]
    fn what_many_streams_left_is_forgotten_now_and_then() {
        let mut streams = Streams::new(0, 8);
        let handles: Vec<RawStream> = (0..1000).map(|_| streams.create(true)).collect();
        let mut forgotten = 0;
        for handle in handles {
            streams.destroy(handle).unwrap();
            if streams.are_many_gone() {
                streams.forget_known(|_, _| true);
                forgotten += 1;
            }
        }
        assert!((1..=11).contains(&forgotten), "{forgotten} times, each of which visits all streams");
    }
}
