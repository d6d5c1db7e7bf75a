//! The model of live blocks: their addresses, their contents, and the work that uses them.

use aquifer_allocator::{AllocError, Allocation, Exportable, Growable};
use aquifer_device::{AccessKind, AccessRange, DevicePtr, Stream, Tick};

/// Bytes compared at either end of a block.
const ENDS: u64 = 64;

/// How a block is held.
#[derive(Debug)]
pub(crate) enum Handle {
    Owned(Allocation),
    Raw,
    Exportable(Exportable),
    Growable(Growable),
}

/// Work on a stream that uses a block.
#[derive(Debug)]
pub(crate) struct Use {
    pub(crate) stream: u32,
    pub(crate) tick: Tick,
    pub(crate) writes: bool,
    /// `record_stream` was called for it.
    pub(crate) recorded: bool,
    /// The block's own stream was ordered after it, when the stream of the use was destroyed.
    pub(crate) is_behind: bool,
}

/// A live block.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) handle: Handle,
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: u64,
    /// The stream it was allocated for.
    pub(crate) own: u32,
    /// What it contains, if that is known.
    pub(crate) pattern: Option<u8>,
    pub(crate) uses: Vec<Use>,
}

impl Live {
    /// Orders `stream` after the block's other uses, those that only read if `all`. The host waits
    /// where the stream cannot: after a stream that is gone and whose last event failed to be
    /// recorded.
    pub(crate) fn order(&self, stream: &Stream, all: bool) -> aquifer_device::Result<()> {
        let mut others = self.uses.iter().filter(|used| used.stream != stream.id() && (all || used.writes));
        others.try_for_each(|used| stream.wait_for(&used.tick).or_else(|_| used.tick.synchronize()))
    }

    /// Uses the block on a stream, and fills it with `pattern` if it is a write. What is enqueued
    /// counts as a use even if a later call fails.
    pub(crate) fn touch(&mut self, stream: &Stream, pattern: Option<u8>, recorded: bool) -> aquifer_device::Result<()> {
        let done = match pattern {
            Some(byte) => {
                let done = stream.fill(self.ptr, byte, self.bytes);
                self.pattern = done.is_ok().then_some(byte);
                done
            }
            None => self.read(stream),
        };
        self.note(stream, pattern.is_some(), recorded);
        done
    }

    /// Reads all of the block where nothing needs to be done with it, else its ends, which the host
    /// waits for.
    fn read(&self, stream: &Stream) -> aquifer_device::Result<()> {
        let Live { ptr, bytes, .. } = *self;
        if self.pattern.is_none() {
            // A fault kept it from being written.
            return Ok(());
        }
        if stream.driver().info().is_virtual {
            return stream.touch("read", &[AccessRange { ptr, bytes, kind: AccessKind::Read }]);
        }
        self.ends().into_iter().try_for_each(|(ptr, bytes)| {
            stream.download_blocking(&mut vec![0; usize::try_from(bytes).unwrap_or(0)], ptr)
        })
    }

    pub(crate) fn note(&mut self, stream: &Stream, writes: bool, recorded: bool) {
        let (id, tick) = (stream.id(), stream.tick());
        match self.uses.iter_mut().find(|used| used.stream == id) {
            // Another stream may have the number of one that is gone: nothing is ordered after its
            // new work.
            Some(used) => {
                (used.tick, used.writes, used.recorded) = (tick, used.writes || writes, used.recorded || recorded);
                used.is_behind = false;
            }
            None => self.uses.push(Use { stream: id, tick, writes, recorded, is_behind: false }),
        }
    }

    fn ends(&self) -> [(DevicePtr, u64); 2] {
        let bytes = self.bytes.min(ENDS);
        [(self.ptr, bytes), (self.ptr.offset(self.bytes - bytes), bytes)]
    }

    /// Reads the ends back on a stream that is ordered after the block's uses, and compares them.
    pub(crate) fn verify(&mut self, stream: &Stream) -> aquifer_device::Result<()> {
        self.note(stream, false, stream.id() == self.own);
        let Some(pattern) = self.pattern else { return Ok(()) };
        for (ptr, bytes) in self.ends() {
            let mut found = vec![0; usize::try_from(bytes).unwrap_or(0)];
            stream.download_blocking(&mut found, ptr)?;
            let (start, end) = (self.ptr.0, self.ptr.0 + self.bytes);
            assert!(
                found.iter().all(|&byte| byte == pattern),
                "the block at {start:#x}..{end:#x} was overwritten at {ptr}: {found:x?} instead of {pattern:#x}"
            );
        }
        Ok(())
    }

    /// Tells the allocator that a stream uses the block.
    pub(crate) fn record(
        &mut self,
        stream: &Stream,
        raw: impl FnOnce(DevicePtr, &Stream) -> Result<(), AllocError>,
    ) -> Result<(), AllocError> {
        match &self.handle {
            Handle::Owned(allocation) => allocation.record_stream(stream)?,
            Handle::Raw => raw(self.ptr, stream)?,
            Handle::Exportable(exportable) => exportable.record_stream(stream)?,
            Handle::Growable(growable) => growable.record_stream(stream)?,
        }
        self.uses.iter_mut().filter(|used| used.stream == stream.id()).for_each(|used| used.recorded = true);
        Ok(())
    }
}

/// The live blocks, none of which may overlap.
#[derive(Debug, Default)]
pub(crate) struct Blocks(pub(crate) Vec<Live>);

impl Blocks {
    /// Adds a block that was just handed out.
    pub(crate) fn add(&mut self, live: Live) {
        let range = live.ptr.range(live.bytes);
        for other in &self.0 {
            let taken = other.ptr.range(other.bytes);
            assert!(
                range.end <= taken.start || taken.end <= range.start || range.is_empty() || taken.is_empty(),
                "{range:x?} was handed out while {taken:x?} is live"
            );
        }
        self.0.push(live);
    }

    /// Number of the live block that `pick` stands for.
    pub(crate) fn pick(&self, pick: usize) -> Option<usize> {
        (!self.0.is_empty()).then(|| pick % self.0.len())
    }

    /// Number of live blocks that have memory, and the bytes asked for.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let held = self.0.iter().filter(|live| live.bytes > 0);
        held.fold((0, 0), |(count, bytes), live| (count + 1, bytes + live.bytes))
    }
}
