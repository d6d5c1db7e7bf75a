//! How much memory and work an input may take for what was read of it.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

use super::error::{Damage, Reason};

/// Memory for any input.
const FOR_ANY: usize = 32 << 20;
/// Memory for each byte of the content. A snapshot takes 3 to 6, a trace 1 to 5; data that was made
/// to takes 100.
const FOR_A_BYTE: usize = 32;
/// What is made of the content, as this decides how much it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Made {
    /// The values of a snapshot. It takes some 400 bytes for an entry of its history, which is
    /// stored in at least ten.
    Values,
    /// The events of a line each. Recorded traces take 5 to 6 bytes for a byte that gzip stores,
    /// and at most 20 for one that xz does.
    Events,
}

impl Made {
    /// Memory for each byte that is stored. Compressed data that was made to could take a hundred
    /// times as much.
    fn for_a_stored_byte(self) -> usize {
        match self {
            Self::Values => 512,
            Self::Events => 128,
        }
    }

    /// Content of any input, and for each byte that is stored. gzip makes at most 1032 bytes of
    /// one. JSON has the same call stacks again and again; lines compress to a 20th at best.
    fn content(self) -> [u64; 2] {
        match self {
            Self::Values => [256 << 20, 1032],
            Self::Events => [64 << 20, 128],
        }
    }
}

/// What was read so far, and with it, how much memory may be taken. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Allowance(Rc<Progress>);

#[derive(Debug, Default)]
struct Progress {
    /// Bytes of the file.
    stored: Cell<u64>,
    /// Bytes that decoders gave, in all layers.
    unpacked: Cell<u64>,
    /// Bytes that were read to make something of them.
    content: Cell<u64>,
    /// Memory of what was read already.
    kept: Cell<usize>,
}

impl Allowance {
    /// Counts the bytes of the file.
    pub(super) fn stored<R: Read>(&self, inner: R) -> impl Read + use<R> {
        Counted { inner, allowance: self.clone(), counter: |progress| &progress.stored, most: None }
    }

    /// Counts the bytes that a decoder gives, and refuses more than a recording has.
    pub(super) fn unpacked<R: Read>(&self, inner: R) -> impl Read + use<R> {
        let most = Some(Made::Values.content());
        Counted { inner, allowance: self.clone(), counter: |progress| &progress.unpacked, most }
    }

    /// Counts the bytes of the content, and refuses more than a recording has.
    pub(super) fn content<R: Read>(&self, inner: R, made: Made) -> impl Read + use<R> {
        let most = Some(made.content());
        Counted { inner, allowance: self.clone(), counter: |progress| &progress.content, most }
    }

    /// Memory that stays taken.
    pub(super) fn keep(&self, bytes: usize) {
        self.0.kept.set(self.0.kept.get().saturating_add(bytes));
    }

    /// Refuses to take more memory than a recording would of which that much was read.
    pub(super) fn check(&self, taken: usize, made: Made) -> Result<(), Reason> {
        let Progress { stored, content, kept, .. } = &*self.0;
        let allowed = |bytes: u64, each: usize| usize::try_from(bytes).unwrap_or(usize::MAX).saturating_mul(each);
        let most = allowed(stored.get(), made.for_a_stored_byte()).min(allowed(content.get(), FOR_A_BYTE));
        let taken = taken.saturating_add(kept.get());
        if taken > most.saturating_add(FOR_ANY) { Err(Reason::TooDense { stored: stored.get() }) } else { Ok(()) }
    }

    /// For tests: as if so much had been read.
    #[cfg(test)]
    pub(super) fn read(stored: usize, content: usize) -> Self {
        let allowance = Self::default();
        allowance.0.stored.set(stored as u64);
        allowance.0.content.set(content as u64);
        allowance
    }
}

struct Counted<R> {
    inner: R,
    allowance: Allowance,
    counter: fn(&Progress) -> &Cell<u64>,
    /// The most for any file, and for each byte of it.
    most: Option<[u64; 2]>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        let counter = (self.counter)(&self.allowance.0);
        counter.set(counter.get() + count as u64);
        let stored = self.allowance.0.stored.get();
        match self.most {
            Some([any, each]) if counter.get() > stored.saturating_mul(each).saturating_add(any) => {
                Err(Damage::TooDense { stored }.into())
            }
            _ => Ok(count),
        }
    }
}
