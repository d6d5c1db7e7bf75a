//! Replays traces to CubeCL's pools, whose pages come from the simulated device. Prints a row of
//! `aquifer-bench peers` for each trace of one stream, and each configuration of the pools.
//! `ci/benchmarks --cubecl` runs it.

use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::time::Instant;

use aquifer::prelude::*;
use aquifer_cubecl::AquiferStorage;
use cubecl_ir::MemoryDeviceProperties;
use cubecl_server::logging::ServerLogger;
use cubecl_server::memory_management::{
    ErrorGraph, MemoryConfiguration, MemoryManagement, MemoryManagementOptions, PageUpdate,
};

/// The bytes of the simulated device. CubeCL's pages have at most a quarter of it, as with CUDA.
const DEVICE_BYTES: u64 = 512 << 30;

/// A block that is allocated, with its bytes, or freed.
enum Event {
    Alloc(usize, u64),
    Free(usize),
}

#[derive(Default)]
struct Program {
    name: String,
    source: String,
    events: Vec<Event>,
    blocks: usize,
    peak: u64,
}

/// Reads a trace; `None` if it has several streams.
fn read(text: &str) -> Result<Option<Program>, Box<dyn Error>> {
    let (mut program, mut live, mut sum) = (Program::default(), HashMap::new(), 0_u64);
    for line in text.lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["#", "name:", name] => name.clone_into(&mut program.name),
            ["#", "source:", ..] => line.trim_start_matches("# source: ").clone_into(&mut program.source),
            ["a", id, bytes, "0"] => {
                let bytes = bytes.parse()?;
                live.insert(id, (program.blocks, bytes));
                program.events.push(Event::Alloc(program.blocks, bytes));
                program.blocks += 1;
                sum += bytes;
                program.peak = program.peak.max(sum);
            }
            ["f", id, "0"] => {
                let (block, bytes) = live.remove(id).ok_or("a free of nothing")?;
                program.events.push(Event::Free(block));
                sum -= bytes;
            }
            _ => return Ok(None),
        }
    }
    Ok(Some(program))
}

fn measure(program: &Program, allocator: &str, config: MemoryConfiguration) -> Result<(), Box<dyn Error>> {
    let device = aquifer::open(&format!("sim:{DEVICE_BYTES},checks=off"))?;
    // Each page is an allocation of the driver's.
    let memory = Allocator::new(&device, "backing:segments,no_cache:True")?;
    let mut managed = MemoryManagement::from_configuration(
        AquiferStorage::new(&memory, &device.stream()?),
        &MemoryDeviceProperties::new(DEVICE_BYTES / 4, 512),
        config,
        Arc::new(ServerLogger::default()),
        MemoryManagementOptions::new(allocator),
    );
    let (mut errors, mut ooms) = (ErrorGraph::default(), 0_u64);
    let mut pass = || {
        let (calls, begin) = (device.driver_calls(), Instant::now());
        let mut handles: Vec<_> = (0..program.blocks).map(|_| None).collect();
        for event in &program.events {
            match *event {
                Event::Free(block) => handles[block] = None,
                Event::Alloc(block, bytes) => match managed.reserve(bytes, PageUpdate::Allow, &mut errors) {
                    Ok(handle) => handles[block] = Some(handle),
                    Err(_) => ooms += 1,
                },
            }
        }
        let ns = begin.elapsed().as_nanos() as f64 / program.events.len().max(1) as f64;
        (device.driver_calls().since(&calls).total(), ns)
    };
    let ((first, _), (warm, _)) = (pass(), pass());
    let mut times = [pass().1, pass().1, pass().1];
    times.sort_by(f64::total_cmp);
    let held = memory.stats().reserved_bytes.all.peak;
    let ratio = if ooms == 0 { (held as f64 / program.peak as f64).to_string() } else { "null".to_owned() };
    println!(
        "{{\"benchmark\":\"{}\",\"source\":\"{}\",\"allocator\":\"{allocator}\",\"peak_requested_bytes\":{},\
         \"peak_reserved_bytes\":{held},\"reserved_over_requested\":{ratio},\"driver_calls\":{first},\
         \"driver_time_modelled_us\":null,\"warm_driver_calls\":{warm},\"warm_driver_time_modelled_us\":null,\
         \"ns_per_op\":{:.2},\"ooms\":{ooms}}}",
        program.name, program.source, program.peak, times[1]
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    for path in std::env::args().skip(1) {
        if let Some(program) = read(&fs::read_to_string(path)?)? {
            measure(&program, "CubeCL, adaptive", MemoryConfiguration::Adaptive)?;
            measure(&program, "CubeCL, exclusive pages", MemoryConfiguration::ExclusivePages)?;
        }
    }
    Ok(())
}
