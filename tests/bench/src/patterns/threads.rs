//! Patterns of mimalloc-bench, which measures allocators of host memory. Sizes are 1024 times as
//! large, in `mstress` 128 times, and each thread has a stream.

use std::collections::VecDeque;

use aquifer_trace::input::Program;
use aquifer_trace::{Block, Random, Script};

const KIB: u64 = 1 << 10;
/// Threads of each kind.
const THREADS: u16 = 4;

/// A server: each thread keeps 5000 blocks of 8 to 1000 KiB, and replaces a random one again and
/// again.
pub(super) fn larson() -> Program {
    const BLOCKS: u32 = 5_000;
    let (mut script, mut random) = (Script::new("larson", THREADS), Random::new(0));
    let size = |random: &mut Random| (8 + u64::from(random.below(993))) * KIB;
    let mut threads: Vec<Vec<Block>> =
        (0..THREADS).map(|thread| (0..BLOCKS).map(|_| script.alloc_on(size(&mut random), thread)).collect()).collect();
    for _ in 0..5 * BLOCKS {
        for (thread, blocks) in (0..).zip(&mut threads) {
            let victim = blocks.swap_remove(random.below(BLOCKS) as usize);
            script.free(victim);
            blocks.push(script.alloc_on(size(&mut random), thread));
        }
    }
    threads.into_iter().for_each(|blocks| script.free_all(blocks));
    script.finish()
}

/// Producers and consumers: half of the threads allocate batches of 4096 blocks of 17 sizes from 8
/// KiB to 2 MiB, the others use and free them.
pub(super) fn xmalloc_test() -> Program {
    const COUNT: u32 = 17;
    const SIZES: [u64; COUNT as usize] =
        [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048];
    let (mut script, mut random) = (Script::new("xmalloc-test", 2 * THREADS), Random::new(0));
    let mut batches: Vec<Vec<Block>> = Vec::new();
    let consume = |script: &mut Script, batches: &mut Vec<Vec<Block>>, thread: u16| {
        // The newest batch first, as in the original.
        for block in batches.pop().into_iter().flatten() {
            script.use_on(&block, THREADS + thread);
            script.free(block);
        }
    };
    for _ in 0..6 {
        for thread in 0..THREADS {
            let batch = (0..4096).map(|_| {
                let size = SIZES[random.below(COUNT) as usize];
                script.alloc_on(size * KIB, thread)
            });
            batches.push(batch.collect());
            if batches.len() > 2 {
                consume(&mut script, &mut batches, thread);
            }
        }
    }
    (0..THREADS).cycle().take(batches.len()).for_each(|thread| consume(&mut script, &mut batches, thread));
    script.finish()
}

/// Threads that keep some blocks to the end, free others soon, and swap others through a table that
/// all share. One block in a hundred is a hundred times as large.
pub(super) fn mstress() -> Program {
    const TABLE: u32 = 1000;
    const SCALE: u32 = 5;
    /// What stands for a word of 8 bytes.
    const WORD: u64 = KIB;
    struct Thread {
        /// Yet to be allocated, and to be retained.
        allocs: u32,
        retains: u32,
        blocks: Vec<Option<Block>>,
        retained: Vec<Block>,
    }
    let (mut script, mut random) = (Script::new("mstress", THREADS), Random::new(0));
    let mut table: Vec<Option<Block>> = (0..TABLE).map(|_| None).collect();
    let mut threads: VecDeque<(u16, Thread)> = (0..THREADS)
        .map(|number| {
            let allocs = 80 * SCALE * (u32::from(number) % 8 + 1);
            (number, Thread { allocs, retains: allocs / 2, blocks: Vec::new(), retained: Vec::new() })
        })
        .collect();
    let mut ended = Vec::new();
    let words = |random: &mut Random, words: u64| if random.below(100) <= 1 { 100 * words } else { words };
    while let Some((number, mut thread)) = threads.pop_front() {
        if thread.allocs == 0 && thread.retains == 0 {
            ended.push(thread);
            continue;
        }
        if thread.retains == 0 || (random.below(100) <= 50 && thread.allocs > 0) {
            thread.allocs -= 1;
            let drawn = u64::from(random.below(128)) + 1;
            thread.blocks.push(Some(script.alloc_on(words(&mut random, drawn) * WORD, number)));
        } else {
            thread.retains -= 1;
            let drawn = 10 * (u64::from(random.below(1280)) + 1);
            thread.retained.push(script.alloc_on(words(&mut random, drawn) * WORD, number));
        }
        let blocks = u32::try_from(thread.blocks.len()).unwrap_or(u32::MAX);
        if random.below(100) <= 66 && blocks > 0 {
            script.free_all(thread.blocks[random.below(blocks) as usize].take());
        }
        if random.below(100) <= 25 && blocks > 0 {
            let mine = &mut thread.blocks[random.below(blocks) as usize];
            std::mem::swap(mine, &mut table[random.below(TABLE) as usize]);
            mine.iter().for_each(|block| script.use_on(block, number));
        }
        threads.push_back((number, thread));
    }
    for Thread { blocks, retained, .. } in ended {
        script.free_all(retained);
        script.free_all(blocks.into_iter().flatten());
    }
    script.free_all(table.into_iter().flatten());
    script.finish()
}
