//! Advice that needs a look at free blocks.

use std::collections::BTreeMap;

use crate::allocator::Allocator;
use crate::heap::kind_of;
use crate::recovery::oom::advice::Advice;
use crate::recovery::oom::report::OomReport;
use crate::request::Request;
use crate::size_class::{MIN_LARGE_ALLOC, PoolKind};
use crate::state::guard::StateGuard;

/// Advice from a look at the free blocks of the request's pool that the request may not have.
pub(super) fn advice_from_blocks(allocator: &Allocator, request: &Request) -> Vec<Advice> {
    let (mut relaxed, mut of_another) = (None, None);
    allocator.state().each_arena(|shared, arena| {
        for (owner, index) in arena.heap.indexes(request.pool) {
            let mut sizes = index.iter_from(request.size).map(|key| key.size());
            let fits = |size: u64| shared.classes.fits(size, request.size);
            if owner == request.slot {
                relaxed = relaxed.or_else(|| sizes.find(|&size| !fits(size)));
            } else {
                of_another = of_another.or_else(|| sizes.find(|&size| fits(size)));
            }
        }
    });
    let relaxed = relaxed.map(|block| Advice::RelaxSplitLimit { block });
    relaxed.into_iter().chain(of_another.map(|block| Advice::CrossStream { block })).collect()
}

/// Advice to make segments smaller, if the request would get a part of one that others share.
pub(super) fn advice_on_segments(allocator: &Allocator, request: &Request, report: &OomReport) -> Option<Advice> {
    let is_medium = allocator.classes().pool(request.size) == PoolKind::Large && request.size < MIN_LARGE_ALLOC;
    let to = report.room() >> 20 << 20;
    let is_shared = is_medium && !report.is_mapped && !allocator.config().no_cache;
    (is_shared && (MIN_LARGE_ALLOC + 1..report.growth).contains(&to)).then_some(Advice::SmallerSegments { to })
}

/// Advice to let private pools lend their memory. As it is lent: only blocks of the stream itself,
/// except those that graphs may use.
pub(super) fn advice_to_lend(guard: &mut StateGuard, request: &Request) -> Vec<Advice> {
    if request.pool >= 2 || guard.try_arena(request.slot).is_none() {
        return Vec::new();
    }
    let heap = guard.heap_of(request.slot);
    let mut largest: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    for number in heap.pools.numbers().filter(|&number| kind_of(number) == kind_of(request.pool)) {
        let private = guard.pools.owner_of(number).filter(|private| private.open && !private.keeps_for_graphs(number));
        let Some((private, index)) = private.zip(heap.index(number, request.slot)) else { continue };
        let sizes = index.iter_from(request.size).map(|key| key.size());
        for size in sizes.filter(|&size| guard.classes.fits(size, request.size)) {
            largest.entry(private.id).and_modify(|largest| *largest = size.max(*largest)).or_insert(size);
        }
    }
    largest.into_iter().map(|(pool, block)| Advice::PrivatePool { pool, block }).collect()
}
