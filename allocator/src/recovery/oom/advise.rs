//! Advice that needs a look at free blocks.

use std::collections::BTreeMap;

use crate::allocator::Allocator;
use crate::heap::kind_of;
use crate::recovery::oom::advice::Advice;
use crate::request::Request;
use crate::state::guard::StateGuard;

/// Advice to let streams reuse each other's blocks, if another one has a free block for the request.
pub(super) fn advice_to_cross_streams(allocator: &Allocator, request: &Request) -> Option<Advice> {
    let mut of_another = None;
    allocator.state().each_arena(|_, arena| {
        for (_, index) in arena.heap.indexes(request.pool).filter(|&(owner, _)| owner != request.slot) {
            of_another = of_another.or_else(|| Some(index.iter_from(request.size).next()?.size()));
        }
    });
    of_another.map(|block| Advice::CrossStream { block })
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
        for size in sizes {
            largest.entry(private.id).and_modify(|largest| *largest = size.max(*largest)).or_insert(size);
        }
    }
    largest.into_iter().map(|(pool, block)| Advice::PrivatePool { pool, block }).collect()
}
