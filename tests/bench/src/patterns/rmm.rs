//! `random_allocations` of RMM, an allocator of NVIDIA's RAPIDS (`cpp/benchmarks`).

use aquifer_trace::Script;
use aquifer_trace::input::Program;

/// Numbers of allocations.
pub(super) const COUNTS: [u32; 3] = [1_000, 10_000, 100_000];
/// The largest sizes, in MiB.
pub(super) const MAX_MIB: [u64; 6] = [1, 4, 64, 256, 1024, 4096];
/// The bytes that may be live.
const USAGE_MAX: u64 = 16_000 << 20;
/// A step allocates with this probability, in percent, unless nothing is live or something forbids
/// it.
const ALLOCATES: u64 = 73;

/// Sizes are uniform; a random live block is freed where none is allocated.
pub(super) fn random_allocations(allocations: u32, max_mib: u64) -> Program {
    let mut random = Engine::new();
    let mut script = Script::new("random_allocations", 1);
    let (mut live, mut count) = (Vec::new(), 0);
    for _ in 0..2 * allocations {
        let size = random.between(1, max_mib << 20);
        let may = |random: &mut Engine| {
            random.between(0, 99) < ALLOCATES && count < allocations && script.live() + size < USAGE_MAX
        };
        if live.is_empty() || may(&mut random) {
            live.push(script.alloc(size));
            count += 1;
        } else {
            let index = random.between(0, u64::from(allocations) - 1) % live.len() as u64;
            let block = live.swap_remove(usize::try_from(index).unwrap_or(0));
            script.free(block);
        }
    }
    script.finish()
}

/// The generator of the original, `std::default_random_engine`, with the uniform distribution of
/// GNU's C++ library, so that the numbers are the same: a multiplicative congruential generator,
/// which gives 1 to 2^31 - 2.
struct Engine(u64);

impl Engine {
    const MODULUS: u64 = (1 << 31) - 1;
    /// The greatest number, counted from 0.
    const RANGE: u64 = Engine::MODULUS - 2;

    fn new() -> Engine {
        Engine(1)
    }

    /// The next number, from 0 on.
    fn next(&mut self) -> u64 {
        self.0 = self.0 * 16_807 % Engine::MODULUS;
        self.0 - 1
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.up_to(most - least)
    }

    /// A number from 0 to `most`. Numbers that would make some results more frequent are skipped;
    /// if one number has too few values, the upper digits of the result are drawn first.
    fn up_to(&mut self, most: u64) -> u64 {
        if most < Engine::RANGE {
            let scale = Engine::RANGE / (most + 1);
            loop {
                let number = self.next();
                if number < (most + 1) * scale {
                    return number / scale;
                }
            }
        }
        if most == Engine::RANGE {
            return self.next();
        }
        loop {
            let digits = (Engine::RANGE + 1) * self.up_to(most / (Engine::RANGE + 1));
            let number = digits + self.next();
            if number <= most {
                return number;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_c_plus_plus_library() {
        // As g++ 12 prints them for sizes of up to so many MiB, chances and indices.
        let drawn = |mib: u64| {
            let mut random = Engine::new();
            [(); 4].map(|()| (random.between(1, mib << 20), random.between(0, 99), random.between(0, 9_999)))
        };
        assert_eq!(drawn(1), [(9, 13, 7_556), (481_165, 53, 2_189), (49_354, 67, 6_792), (980_576, 38, 5_194)]);
        assert_eq!(
            drawn(4096),
            [(282_475_249, 75, 4_586), (2_617_694_918, 4, 6_788), (3_262_921_811, 83, 345), (1_137_522_503, 67, 76)]
        );
    }

    #[test]
    fn usage_is_limited() {
        let program = random_allocations(1_000, 4096);
        assert!((8_000 << 20..USAGE_MAX).contains(&program.peak_requested_bytes), "{}", program.peak_requested_bytes);
        assert!(program.allocs() <= 1_000 && program.operations() == 2_000);
    }
}
