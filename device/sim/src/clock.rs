//! Vector clocks: for each stream of every device, the last of its operations that something is
//! ordered after.
//!
//! A clock is sparse: a stream that is not listed stands at 0, before its first operation.

use aquifer_device::internal::StreamMap;

/// A stream among those of all simulated devices of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamKey {
    /// Number of the device, never reused.
    pub(crate) device: u32,
    /// Identity of the stream on it.
    pub(crate) stream: u32,
}

/// Up to which operation of every stream something is ordered after.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpClock(
    /// The components by device. Copies share equal parts.
    Vec<(u32, StreamMap)>,
);

impl OpClock {
    /// The stream's component.
    pub(crate) fn get(&self, stream: StreamKey) -> u64 {
        self.place(stream.device).map_or(0, |at| self.0[at].1.get(stream.stream))
    }

    /// Makes the stream's component at least `seq`.
    pub(crate) fn raise(&mut self, stream: StreamKey, seq: u64) {
        self.of(stream.device).raise(stream.stream, seq);
    }

    /// Makes this at least `other` in every component.
    pub(crate) fn join(&mut self, other: &OpClock) {
        for (device, streams) in &other.0 {
            self.of(*device).join(streams);
        }
    }

    /// Forgets the components that do not pass, except some next to others that do.
    pub(crate) fn forget_unless(&mut self, mut keep: impl FnMut(StreamKey, u64) -> bool) {
        self.0.retain_mut(|&mut (device, ref mut streams)| {
            streams.forget_unless(|stream, seq| keep(StreamKey { device, stream }, seq));
            !streams.is_empty()
        });
    }

    /// The components that are not 0.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamKey, u64)> + '_ {
        self.0.iter().flat_map(|&(device, ref streams)| {
            streams.entries().into_iter().map(move |(stream, seq)| (StreamKey { device, stream }, seq))
        })
    }

    /// Forgets every component.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    fn place(&self, device: u32) -> Result<usize, usize> {
        self.0.binary_search_by_key(&device, |&(listed, _)| listed)
    }

    fn of(&mut self, device: u32) -> &mut StreamMap {
        let at = self.place(device).unwrap_or_else(|at| {
            self.0.insert(at, (device, StreamMap::default()));
            at
        });
        &mut self.0[at].1
    }
}
