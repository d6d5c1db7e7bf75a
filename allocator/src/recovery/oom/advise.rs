//! Advice that needs a look at free blocks.

use std::collections::BTreeMap;

use crate::core::Core;
use crate::recovery::oom::advice::Advice;
use crate::types::Request;

/// Advice to let streams reuse each other's blocks, if another one has a free block for the request.
pub(super) fn advice_to_cross_streams(core: &Core, request: &Request) -> Option<Advice> {
    let others = core.heap().indexes(request.pool).filter(|(owner, _)| owner.stream != request.stream);
    let mut sizes = others.filter_map(|(_, index)| Some(index.first_fit(request.size)?.size()));
    sizes.next().map(|block| Advice::CrossStream { block })
}

/// Advice to let private pools lend their memory. As it is lent: only blocks of the stream itself,
/// except those that graphs may use.
pub(super) fn advice_to_lend(core: &Core, request: &Request) -> Vec<Advice> {
    if request.pool.is_private() {
        return Vec::new();
    }
    let heap = &core.heap();
    let mut largest: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    for number in heap.pools().filter(|&number| number.kind() == request.pool.kind()) {
        let private = core.pools.owner_of(number).filter(|private| private.open && !private.keeps_for_graphs(number));
        let Some(private) = private else { continue };
        let own = heap.indexes(number).filter(|(owner, _)| owner.stream == request.stream);
        for size in own.flat_map(|(_, index)| index.iter_from(request.size)).map(|key| key.size()) {
            largest.entry(private.id).and_modify(|largest| *largest = size.max(*largest)).or_insert(size);
        }
    }
    largest.into_iter().map(|(pool, block)| Advice::PrivatePool { pool, block }).collect()
}
