//! Copies between host memory as a pure state machine: which piece of which copy is to be made next.
//!
//! They need no chunk and no stream, so they are apart from the ring (`ring`) and share only its threads (`floor`).
//!
//! Invariants: every byte of a copy that does not fail is begun once, in order; copies take turns by the piece; a copy ends once, when nobody
//! has a piece of it in hand.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::task::JobId;
use crate::error::TransferError;

/// Bytes of a piece: about 100 µs at 10 GB/s, for so long a thread is kept from staged transfers.
pub(super) const PIECE_BYTES: u64 = 1 << 20;

/// Copies that were begun and have not ended.
#[derive(Debug)]
pub(super) struct Copies<K> {
    jobs: BTreeMap<JobId, Entry<K>>,
    next_job: JobId,
    /// Copies with pieces that were not begun, in the order of their turns.
    turns: VecDeque<JobId>,
}

#[derive(Debug)]
struct Entry<K> {
    work: K,
    bytes: u64,
    begun: u64,
    /// Pieces in hands.
    hands: usize,
    failed: Option<TransferError>,
}

/// A piece in somebody's hands.
#[derive(Debug)]
pub(super) struct Piece<K> {
    id: JobId,
    pub(super) work: K,
    pub(super) range: Range<u64>,
}

/// A copy that ended, which nobody has in hand any more.
pub(super) type Ended<K> = (K, Result<(), TransferError>);

impl<K: Clone> Copies<K> {
    pub(super) fn new() -> Self {
        Copies { jobs: BTreeMap::new(), next_job: 0, turns: VecDeque::new() }
    }

    /// Takes a copy of so many bytes in, not 0.
    pub(super) fn submit(&mut self, work: K, bytes: u64) {
        let id = self.next_job;
        self.next_job += 1;
        self.jobs.insert(id, Entry { work, bytes, begun: 0, hands: 0, failed: None });
        self.turns.push_back(id);
    }

    /// Whether no copy is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Whether [`Copies::next`] has a piece.
    pub(super) fn has_piece(&self) -> bool {
        !self.turns.is_empty()
    }

    /// The next piece, which is given back to [`Copies::complete`].
    pub(super) fn next(&mut self) -> Option<Piece<K>> {
        let id = self.turns.pop_front()?;
        let entry = self.jobs.get_mut(&id)?;
        let start = entry.begun;
        entry.begun = start.saturating_add(PIECE_BYTES).min(entry.bytes);
        entry.hands += 1;
        if entry.begun < entry.bytes {
            self.turns.push_back(id);
        }
        Some(Piece { id, work: entry.work.clone(), range: start..entry.begun })
    }

    /// Takes a piece back, and gives its copy if that ended with it. After a failure no more of it is begun.
    pub(super) fn complete(&mut self, piece: Piece<K>, copied: Result<(), TransferError>) -> Option<Ended<K>> {
        // The piece's own part in the work goes first, so that who ends the copy has the last one.
        let Piece { id, work, .. } = piece;
        drop(work);
        let entry = self.jobs.get_mut(&id)?;
        entry.hands -= 1;
        if let Err(error) = copied {
            entry.failed.get_or_insert(error);
            self.turns.retain(|&turn| turn != id);
        }
        self.end_if_done(id)
    }

    /// Fails all copies; gives those that nobody has in hand.
    pub(super) fn fail_all(&mut self, error: &TransferError) -> Vec<Ended<K>> {
        self.turns.clear();
        for entry in self.jobs.values_mut() {
            entry.failed.get_or_insert_with(|| error.clone());
        }
        let ids: Vec<JobId> = self.jobs.keys().copied().collect();
        ids.into_iter().filter_map(|id| self.end_if_done(id)).collect()
    }

    fn end_if_done(&mut self, id: JobId) -> Option<Ended<K>> {
        let is_done = |entry: &Entry<K>| entry.hands == 0 && (entry.failed.is_some() || entry.begun == entry.bytes);
        let entry = self.jobs.get(&id).is_some_and(is_done).then(|| self.jobs.remove(&id))??;
        Some((entry.work, entry.failed.map_or(Ok(()), Err)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever is submitted, begun, done or failed when: all bytes of a copy are copied once unless it fails, copies that have pieces
        /// left pass each other by one piece at most, and each ends once.
        #[test]
        fn copies_take_turns_and_end_once(
            steps in prop::collection::vec((0u8..8, any::<prop::sample::Index>(), 1..4 * PIECE_BYTES), 1..80),
        ) {
            let (mut copies, mut out) = (Copies::new(), Vec::<Piece<u32>>::new());
            let (mut bytes, mut begun, mut ended) = (Vec::new(), Vec::<u64>::new(), BTreeMap::new());
            // Pieces of others that were begun since one of this copy was.
            let mut passed = BTreeMap::<(u32, u32), usize>::new();
            let mut failed = std::collections::BTreeSet::new();
            let mut end = |over: Option<Ended<u32>>, out: &[Piece<u32>]| {
                if let Some((copy, result)) = over {
                    assert!(out.iter().all(|piece| piece.work != copy), "it ended in somebody's hands");
                    assert!(ended.insert(copy, result.is_ok()).is_none(), "it ended twice");
                }
            };
            for (step, index, size) in steps {
                match step {
                    0 | 1 => {
                        copies.submit(u32::try_from(bytes.len()).unwrap(), size);
                        bytes.push(size);
                        begun.push(0);
                    }
                    2..=4 => {
                        let Some(piece) = copies.next() else { continue };
                        let own = usize::try_from(piece.work).unwrap();
                        prop_assert_eq!((piece.range.start, piece.range.end - piece.range.start <= PIECE_BYTES), (begun[own], true));
                        begun[own] = piece.range.end;
                        passed.retain(|&(copy, _), _| copy != piece.work);
                        for copy in (0..bytes.len()).filter(|&copy| copy != own && begun[copy] < bytes[copy]) {
                            let copy = u32::try_from(copy).unwrap();
                            let times = passed.entry((copy, piece.work)).or_default();
                            *times += 1;
                            prop_assert!(*times <= 1 || failed.contains(&copy), "{} was passed twice", copy);
                        }
                        out.push(piece);
                    }
                    _ => {
                        if out.is_empty() {
                            continue;
                        }
                        let piece = out.swap_remove(index.index(out.len()));
                        let result = if step == 7 { Err(TransferError::Cancelled) } else { Ok(()) };
                        if step == 7 {
                            failed.insert(piece.work);
                        }
                        end(copies.complete(piece, result), &out);
                    }
                }
            }
            while let Some(piece) = out.pop().or_else(|| copies.next()) {
                let own = usize::try_from(piece.work).unwrap();
                begun[own] = begun[own].max(piece.range.end);
                end(copies.complete(piece, Ok(())), &out);
            }
            prop_assert!(copies.is_idle() && !copies.has_piece());
            for copy in 0..bytes.len() {
                let number = u32::try_from(copy).unwrap();
                prop_assert_eq!(ended[&number], !failed.contains(&number));
                prop_assert!(failed.contains(&number) || begun[copy] == bytes[copy]);
            }
        }
    }

    #[test]
    fn without_threads_all_fail_but_what_is_in_hand() {
        let mut copies = Copies::new();
        copies.submit('a', 3 * PIECE_BYTES);
        copies.submit('b', 1);
        let piece = copies.next().unwrap();
        let ended = copies.fail_all(&TransferError::Cancelled);
        assert_eq!(ended.iter().map(|(copy, _)| *copy).collect::<String>(), "b");
        assert!(!copies.has_piece() && !copies.is_idle());
        let (copy, result) = copies.complete(piece, Ok(())).unwrap();
        assert!(copy == 'a' && result.is_err() && copies.is_idle());
    }
}
