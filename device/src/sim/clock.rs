//! Vector clocks: for each stream, of whichever device, up to which of its operations something is ordered after.
//!
//! A clock is sparse: a stream that is not listed stands at 0, before its first operation.

/// A stream among those of all simulated devices of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StreamKey {
    /// Number of the device, never reused.
    pub(super) device: u32,
    /// Identity of the stream on it.
    pub(super) stream: u32,
}

/// Up to which operation of every stream something is ordered after.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock(
    /// (stream, operation number on that stream), ordered by stream.
    Vec<(StreamKey, u64)>,
);

impl Clock {
    /// The stream's component.
    pub(super) fn get(&self, stream: StreamKey) -> u64 {
        self.0.binary_search_by_key(&stream, |&(listed, _)| listed).map_or(0, |index| self.0[index].1)
    }

    /// Makes the stream's component at least `seq`.
    pub(super) fn raise(&mut self, stream: StreamKey, seq: u64) {
        match self.0.binary_search_by_key(&stream, |&(listed, _)| listed) {
            Ok(index) => self.0[index].1 = self.0[index].1.max(seq),
            Err(index) => self.0.insert(index, (stream, seq)),
        }
    }

    /// Makes this at least `other` in every component.
    pub(super) fn join(&mut self, other: &Clock) {
        for &(stream, seq) in &other.0 {
            self.raise(stream, seq);
        }
    }

    /// Keeps only the components that pass.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(StreamKey, u64) -> bool) {
        self.0.retain(|&(stream, seq)| keep(stream, seq));
    }

    /// The components that are not 0.
    pub(super) fn iter(&self) -> impl Iterator<Item = (StreamKey, u64)> + '_ {
        self.0.iter().copied()
    }

    /// Forgets every component.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joining_takes_the_greater_of_each_component() {
        let key = |device, stream| StreamKey { device, stream };
        let mut left = Clock::default();
        left.raise(key(0, 3), 5);
        left.raise(key(0, 1), 2);
        left.raise(key(1, 1), 7);
        let mut right = Clock::default();
        right.raise(key(0, 3), 4);
        right.raise(key(0, 2), 9);
        right.raise(key(1, 1), 8);
        left.join(&right);
        let all = [(key(0, 1), 2), (key(0, 2), 9), (key(0, 3), 5), (key(1, 1), 8)];
        assert_eq!(left.iter().collect::<Vec<_>>(), all);
        assert_eq!((left.get(key(0, 2)), left.get(key(1, 2))), (9, 0));
        left.retain(|_, seq| seq > 2);
        assert_eq!(left.get(key(0, 1)), 0);
    }
}
