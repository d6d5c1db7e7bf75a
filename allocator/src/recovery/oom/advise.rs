//! Advice that needs a look at free blocks.

use std::collections::BTreeMap;

use crate::allocator::Allocator;
use crate::heap::kind_of;
use crate::recovery::oom::advice::Advice;
use crate::recovery::oom::report::OomReport;
use crate::request::Request;
use crate::size_class::{MIN_LARGE_ALLOC, PoolKind};
use crate::state::shared::SharedState;

/// Advice from a look at the free blocks of the request's pool that the request may not have.
pub(super) fn advice_from_blocks(allocator: &Allocator, request: &Request) -> Vec<Advice> {
    let guard = allocator.state().lock();
    let others = guard.heap.indexes(request.pool).filter(|(owner, _)| owner.stream != request.slot);
    let of_another = others.filter_map(|(_, index)| Some(index.first_fit(request.size)?.size())).next();
    of_another.map(|block| Advice::CrossStream { block }).into_iter().collect()
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
pub(super) fn advice_to_lend(shared: &SharedState, request: &Request) -> Vec<Advice> {
    if request.pool >= 2 {
        return Vec::new();
    }
    let heap = &shared.heap;
    let mut largest: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    for number in heap.pools.numbers().filter(|&number| kind_of(number) == kind_of(request.pool)) {
        let private = shared.pools.owner_of(number).filter(|private| private.open && !private.keeps_for_graphs(number));
        let Some(private) = private else { continue };
        let own = heap.indexes(number).filter(|(owner, _)| owner.stream == request.slot);
        for size in own.flat_map(|(_, index)| index.iter_from(request.size)).map(|key| key.size()) {
            largest.entry(private.id).and_modify(|largest| *largest = size.max(*largest)).or_insert(size);
        }
    }
    largest.into_iter().map(|(pool, block)| Advice::PrivatePool { pool, block }).collect()
}
