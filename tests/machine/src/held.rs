//! What threads have and leave to each other, with its shadow: the contents, and who used it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer::device::{Capture, DevicePtr, Tick};
use aquifer::memory::{Allocation, Growable, PrivatePool};
use aquifer::prelude::*;
use aquifer::{Graph, Pending};
use aquifer_device::DeviceError;

/// A buffer with its contents: one byte everywhere, if that is known.
pub(crate) struct Owned {
    pub(crate) buffer: Buffer<u8>,
    pub(crate) pattern: Option<u8>,
    /// What may be lost in sleep together with it, and how often that was before it was written.
    pub(crate) kind: usize,
    pub(crate) lost: u64,
    /// An upload of these contents that may still be under way.
    pub(crate) coming: Option<Pending<()>>,
}

/// Bare memory: who uses it sees to the order.
pub(crate) struct Raw {
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: u64,
    /// `None` for a raw pointer.
    pub(crate) owner: Option<Allocation>,
    /// The stream that it was allocated for.
    pub(crate) stream: Stream,
    /// The last use of each stream.
    pub(crate) uses: Vec<Use>,
    /// Its contents, if they are known, and how often contents were lost before.
    pub(crate) pattern: Option<u8>,
    pub(crate) lost: u64,
}

pub(crate) struct Use {
    pub(crate) stream: Stream,
    pub(crate) tick: Tick,
    pub(crate) writes: bool,
    /// The allocator knows of it.
    pub(crate) is_recorded: bool,
}

/// Memory that grows, with the tick of its last use.
pub(crate) struct Growing {
    pub(crate) memory: Growable,
    pub(crate) used: Tick,
    /// As of [`Raw`].
    pub(crate) pattern: Option<u8>,
    pub(crate) lost: u64,
}

impl Raw {
    /// Orders a stream after such uses by others. The host waits where the stream cannot.
    pub(crate) fn order(&self, stream: &Stream, such: impl Fn(&Use) -> bool) -> Result<(), DeviceError> {
        let mut others = self.uses.iter().filter(|used| used.stream.id() != stream.id() && such(used));
        others.try_for_each(|used| stream.wait_for(&used.tick).or_else(|_| used.tick.synchronize()))
    }

    /// True for a raw pointer to this address.
    pub(crate) fn is_raw_at(&self, ptr: DevicePtr) -> bool {
        self.owner.is_none() && self.ptr == ptr
    }

    pub(crate) fn note(&mut self, stream: &Stream, writes: bool) {
        let (tick, is_recorded) = (stream.tick(), stream.id() == self.stream.id());
        match self.uses.iter_mut().find(|used| used.stream.id() == stream.id()) {
            Some(used) => (used.tick, used.writes) = (tick, used.writes || writes),
            None => self.uses.push(Use { stream: stream.clone(), tick, writes, is_recorded }),
        }
    }
}

/// A graph with what it reads.
pub(crate) struct Replayed {
    pub(crate) graph: Graph<[Buffer<u8>; 2]>,
    /// Each launch copies it to the first output.
    pub(crate) parameter: Buffer<u8>,
    /// Each launch copies it to the second output. `None` once only the graph keeps it.
    pub(crate) constant: Option<Buffer<u8>>,
    /// The contents of `constant`, if they are known, and how often contents were lost before.
    pub(crate) pattern: Option<(u8, u64)>,
    /// A SWITCH, whose first body copies the parameter to the second output.
    pub(crate) node: Option<u64>,
    /// Each launch downloads the first output to it.
    pub(crate) pinned: Option<PinnedBuffer<u8>>,
}

/// What a thread leaves to another one.
pub(crate) enum Handed {
    Buffer(Owned),
    Raw(Raw),
    Pool(PrivatePool),
    Graph(aquifer::device::Graph),
    Replayed(Box<Replayed>),
    /// To be dropped by a thread that may not be able to end it.
    Capture(Capture, Arc<Dropping>),
}

/// Whether a capture was dropped. What its stream enqueued before may have been captured, and what
/// it enqueues afterwards is not.
#[derive(Debug, Default)]
pub(crate) struct Dropping {
    done: AtomicBool,
}

impl Dropping {
    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }

    pub(crate) fn finish(&self, capture: Capture) {
        drop(capture);
        self.done.store(true, Ordering::Relaxed);
    }
}
