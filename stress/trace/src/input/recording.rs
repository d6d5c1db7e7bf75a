//! Completes recordings that do not begin with the program, or have gaps.

use std::collections::{BTreeMap, HashSet};

use super::error::Reason;
use super::program::{Builder, Live};

/// Builds a program from blocks that the recording names by address.
///
/// The free of an address that did not occur before belongs to a block that was allocated before
/// the recording starts. It is allocated before all others. Memory that is allocated again was
/// freed.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) builder: Builder,
    /// Addresses that occurred.
    seen: HashSet<u64>,
    /// Sizes of the live blocks by address.
    ranges: BTreeMap<u64, u64>,
    pub(super) found: u64,
    lost_frees: u64,
    lost_allocs: u64,
}

impl Recording {
    pub(super) fn new(builder: Builder) -> Self {
        let (seen, ranges) = (HashSet::new(), BTreeMap::new());
        Self { builder, seen, ranges, found: 0, lost_frees: 0, lost_allocs: 0 }
    }

    /// Memory in use.
    pub(super) fn bytes(&self) -> usize {
        // An entry of a tree takes some three words.
        self.builder.bytes() + self.seen.capacity() * 9 + self.ranges.len() * 24
    }

    pub(super) fn is_live(&self, addr: Option<u64>) -> bool {
        addr.is_some_and(|addr| self.ranges.contains_key(&addr))
    }

    /// Remembers an address.
    pub(super) fn saw(&mut self, addr: Option<u64>) {
        self.seen.extend(addr);
    }

    /// Adds an allocation. A live block at the address was freed before.
    pub(super) fn alloc(&mut self, addr: u64, size: u64, stream: u64) -> Result<(), Reason> {
        self.lost_frees += u64::from(self.free(addr)?.is_some());
        self.seen.try_reserve(1)?;
        self.seen.insert(addr);
        self.ranges.insert(addr, size);
        self.builder.alloc(addr, size, stream).map(|_| ())
    }

    /// The block of a free, which may precede the recording. `None` if it was freed already.
    pub(super) fn freed(&mut self, addr: u64, size: u64, stream: u64) -> Result<Option<Live>, Reason> {
        if !self.ranges.contains_key(&addr) && !self.found(addr, size, stream)? {
            self.lost_allocs += 1;
        }
        Ok(self.builder.live(addr))
    }

    pub(super) fn free(&mut self, addr: u64) -> Result<Option<Live>, Reason> {
        self.ranges.remove(&addr);
        self.builder.free(addr)
    }

    /// Frees the live blocks in a range of memory that can no longer hold them.
    pub(super) fn free_within(&mut self, addr: u64, size: u64) -> Result<(), Reason> {
        let end = addr.saturating_add(size.max(1));
        while let Some((&at, &length)) = self.ranges.range(..end).next_back()
            && at.saturating_add(length.max(1)) > addr
        {
            self.free(at)?;
            self.lost_frees += 1;
        }
        Ok(())
    }

    /// Adds a block that was allocated before the recording starts; `false` if the address
    /// occurred.
    pub(super) fn found(&mut self, addr: u64, size: u64, stream: u64) -> Result<bool, Reason> {
        self.seen.try_reserve(1)?;
        if !self.seen.insert(addr) {
            return Ok(false);
        }
        self.found += 1;
        self.ranges.insert(addr, size);
        self.builder.alloc_first(addr, size, stream)?;
        Ok(true)
    }

    /// Notes what was inferred; `what` is the name of the recording.
    pub(super) fn note(&mut self, what: &str) {
        self.builder.note(
            self.found,
            &format!(
                "blocks that were allocated before the {what} begins, allocated first by address (the recording began \
                 later than the program, or was cut off)"
            ),
        );
        self.builder.note(
            self.lost_frees,
            &format!("blocks without a free in the {what}, freed before their memory is allocated again or released"),
        );
        self.builder.note(self.lost_allocs, "frees of blocks that are not allocated, skipped");
    }
}
