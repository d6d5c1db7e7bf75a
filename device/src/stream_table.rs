//! The streams of a device by the driver's handle, so that a stream which comes from another
//! library is found again.
//!
//! The driver gives the handle of a destroyed stream to a new one. So a stream counts as known only
//! while it is open and serves the handle, and an adopted one only while the driver identifies it
//! by the same number ([`Driver::stream_id`](crate::Driver::stream_id)).
//!
//! The table's lock is a leaf.

use std::collections::HashMap;

use crate::driver::RawStream;
use crate::external::ExternalStream;
use crate::fork::Mutex;
use crate::stream::{Stream, WeakStream};

/// The streams of a device by handle.
#[derive(Debug, Default)]
pub(crate) struct StreamTable(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    known: HashMap<u64, TableEntry>,
    /// Number of streams after the last removal of those that are gone. The next one comes at twice
    /// that number.
    left: usize,
}

/// A stream.
#[derive(Debug)]
struct TableEntry {
    stream: WeakStream,
    /// The driver's number of an adopted stream, if it has one.
    identity: Option<u64>,
    /// For a stream that the device adopted until it is forgotten.
    kept: Option<ExternalStream>,
}

impl StreamTable {
    /// Adds a stream. Returns the adopted stream that had the handle before and was destroyed by
    /// its owner.
    pub(crate) fn insert(
        &self,
        stream: &Stream,
        identity: Option<u64>,
        kept: Option<ExternalStream>,
    ) -> Option<ExternalStream> {
        let (raw, new) = (stream.raw().0, TableEntry { stream: stream.downgrade(), identity, kept });
        let mut table = self.0.lock();
        let Table { known, left } = &mut *table;
        remove_gone(known, left, |known| known.stream.is_alive());
        known.insert(raw, new).and_then(|before| before.kept)
    }

    /// The stream with this handle, and the driver's number of it.
    pub(crate) fn find(&self, raw: RawStream) -> Option<(Stream, Option<u64>)> {
        let found = self.0.lock().known.get(&raw.0).and_then(TableEntry::alive);
        // A handle of a released stream may live on, and its timeline may serve another stream.
        found.filter(|(stream, _)| stream.raw() == raw && stream.timeline().is_open())
    }

    /// Takes the stream out that the device adopted with this handle.
    pub(crate) fn take_kept(&self, raw: RawStream) -> Option<ExternalStream> {
        self.0.lock().known.get_mut(&raw.0)?.kept.take()
    }

    /// Puts a stream back that [`StreamTable::take_kept`] took out.
    pub(crate) fn put_back(&self, kept: ExternalStream) {
        let mut table = self.0.lock();
        if let Some(known) = table.known.get_mut(&kept.stream().raw().0).filter(|known| known.kept.is_none()) {
            known.kept = Some(kept);
            return;
        }
        drop(table);
        drop(kept);
    }
}

/// Removes entries that are gone, once there are twice as many as were left the last time.
fn remove_gone<T>(known: &mut HashMap<u64, T>, left: &mut usize, is_alive: impl Fn(&T) -> bool) {
    if known.len() > 2 * *left {
        known.retain(|_, known| is_alive(known));
        *left = known.len();
    }
}

impl TableEntry {
    fn alive(&self) -> Option<(Stream, Option<u64>)> {
        Some((self.stream.upgrade()?, self.identity))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_are_gone_are_removed_from_the_table() {
        let (mut known, mut left) = (HashMap::from([(0, true)]), 0);
        for handle in 1..200 {
            remove_gone(&mut known, &mut left, |is_alive| *is_alive);
            known.insert(handle, false);
        }
        assert!(known.len() < 8);
        assert!(known[&0]);
    }
}
