//! Patterns that are known to fragment memory.

use aquifer_trace::input::Program;
use aquifer_trace::{Block, Random, Script};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn several(script: &mut Script, count: u32, bytes: u64) -> Vec<Block> {
    (0..count).map(|_| script.alloc(bytes)).collect()
}

/// Eight blocks of 16 MiB, then, once they are freed, four of 32 MiB.
pub(super) fn ascending() -> Program {
    let mut script = Script::new("ascending", 1);
    let small = several(&mut script, 8, 16 * MIB);
    script.free_all(small);
    let large = several(&mut script, 4, 32 * MIB);
    script.free_all(large);
    script.finish()
}

/// Four blocks of 16 MiB, of which the first and the third are freed, then one of 32 MiB.
pub(super) fn comb() -> Program {
    let mut script = Script::new("comb", 1);
    let blocks = several(&mut script, 4, 16 * MIB);
    let (freed, kept): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
    script.free_all(freed.into_iter().map(|(_, block)| block));
    let large = script.alloc(32 * MIB);
    script.free(large);
    script.free_all(kept.into_iter().map(|(_, block)| block));
    script.finish()
}

/// 2 MiB, then, once they are freed, half a MiB.
pub(super) fn loophole() -> Program {
    let mut script = Script::new("loophole", 1);
    for bytes in [2 * MIB, MIB / 2] {
        let block = script.alloc(bytes);
        script.free(block);
    }
    script.finish()
}

/// A hundred times 91 MiB and 45.5 MiB, of which a block of 2 MiB stays behind.
pub(super) fn stays_behind() -> Program {
    let mut script = Script::new("stays_behind", 1);
    for _ in 0..100 {
        let [one, other] = [91 * MIB, 91 * MIB / 2].map(|bytes| script.alloc(bytes));
        script.alloc(2 * MIB);
        script.free_all([one, other]);
    }
    script.finish()
}

/// Three times: 64 blocks of 1 GiB, give or take 1 MiB, of which every other one is freed, then one
/// of 9 GiB.
pub(super) fn comb_1gib() -> Program {
    let (mut script, mut random) = (Script::new("comb_1gib", 1), Random::new(0));
    let mut kept: Vec<Block> = Vec::new();
    for _ in 0..3 {
        let mut freed = Vec::new();
        for index in 0..64 - kept.len() {
            let block = script.alloc(GIB - MIB + u64::from(random.below(4096)) * 512);
            if index % 2 == 0 || kept.len() >= 32 { freed.push(block) } else { kept.push(block) }
        }
        script.free_all(freed);
        let large = script.alloc(9 * GIB);
        script.free(large);
    }
    script.finish()
}

/// KV blocks of 16 tokens of Qwen3-0.6B: 28 layers of 64 KiB. A hundred requests of 640 tokens, at
/// most 32 at a time, which end in any order. `pieces` of each block are allocated one by one.
fn stride(pieces: u64) -> Program {
    const LAYERS: u64 = 28;
    let (mut script, mut random) = (Script::new("stride", 1), Random::new(0));
    // Blocks of the requests that are served, and how many each has yet to get.
    let mut served: Vec<(Vec<Block>, u32)> = Vec::new();
    let mut waiting: u32 = 100;
    loop {
        while served.len() < 32 && waiting > 0 {
            // The prompt's 512 tokens at once.
            let prompt = (0..32 * pieces).map(|_| script.alloc(LAYERS / pieces * 64 * KIB)).collect();
            // Outputs end early.
            served.push((prompt, 1 + random.below(8)));
            waiting -= 1;
        }
        if served.is_empty() {
            return script.finish();
        }
        for (blocks, left) in &mut served {
            blocks.extend((0..pieces).map(|_| script.alloc(LAYERS / pieces * 64 * KIB)));
            *left -= 1;
        }
        let (ended, rest): (Vec<_>, Vec<_>) = served.into_iter().partition(|(_, left)| *left == 0);
        ended.into_iter().for_each(|(blocks, _)| script.free_all(blocks));
        served = rest;
    }
}

/// All layers of a block beside each other.
pub(super) fn stride_contiguous() -> Program {
    stride(1)
}

/// Each layer by itself.
pub(super) fn stride_of_layers() -> Program {
    stride(28)
}

/// Two scratch buffers that each grow by 4 KiB 20 000 times; each is freed before it is allocated
/// anew.
pub(super) fn grow_by_little() -> Program {
    let mut script = Script::new("grow_by_little", 1);
    let mut buffers: [Option<Block>; 2] = [None, None];
    for step in 1..=20_000 {
        for buffer in &mut buffers {
            script.free_all(buffer.take());
            *buffer = Some(script.alloc(step * 4 * KIB));
        }
    }
    script.free_all(buffers.into_iter().flatten());
    script.finish()
}
