//! Buffers that go from stream to stream, ordered by the ticks that they carry.
//!
//! ```text
//! cargo run -p aquifer-kernels --example streams [device, such as cuda:0 or sim:h100]
//! ```

use std::error::Error;
use std::time::Duration;

use aquifer_allocator::{Allocator, Buffer, Config};
use aquifer_device::DeviceSpec;
use aquifer_kernels::Kernels;

fn main() -> Result<(), Box<dyn Error>> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "sim".into()).parse::<DeviceSpec>()?.open()?;
    let allocator = Allocator::new(&device, Config::default())?;
    let kernels = Kernels::load(&device)?;
    let (produce, consume) = (device.stream()?, device.stream()?);
    let mut findings: Buffer<u64> = allocator.alloc(Kernels::FINDINGS_LEN, &consume)?;
    kernels.fill(&consume, &mut findings, 0u64)?;

    let (rounds, bytes) = (100, 4 << 20);
    for seed in 0..rounds {
        let mut memory: Buffer<u8> = allocator.alloc(bytes, &produce)?;
        kernels.spin(&produce, Duration::from_micros(50))?;
        kernels.pattern_write(&produce, &mut memory, seed)?;
        // Waits for the pattern. The buffer goes at the end of the round; its memory is not reused before it was verified.
        kernels.pattern_verify(&consume, &memory, seed, &mut findings)?;
    }
    match kernels.mismatches(&consume, &findings)? {
        None => println!("{}: {rounds} buffers of {bytes} bytes went between streams unharmed", device.info().name),
        Some(found) => return Err(format!("{} words were wrong, the first at {}", found.words, found.first).into()),
    }
    let counts = device.timeline_counts();
    println!(
        "{} events recorded, {} waits, {} bytes held",
        counts.events_recorded,
        counts.waits_inserted,
        allocator.memory_reserved()
    );
    match device.driver().take_violation() {
        Some(violation) => Err(violation.into()),
        None => Ok(()),
    }
}
