//! The cards that the simulator can stand for, and the costs of calls and work on them in virtual
//! time.
//!
//! | figure | H100 SXM | H200 SXM | A100 SXM 80 GB | RTX 4090 | source |
//! | --- | --- | --- | --- | --- | --- |
//! | memory | 80 GiB | 141 GiB | 80 GiB | 24 GiB | marketed size, read as GiB; real cards give out somewhat less |
//! | memory bandwidth | 3.35 TB/s | 4.8 TB/s | 2.039 TB/s | 1.008 TB/s | data sheets |
//! | FP32 | 67 TFLOP/s | 67 TFLOP/s | 19.5 TFLOP/s | 82.6 TFLOP/s | data sheets |
//! | multiprocessors | 132 | 132 | 108 | 128 | architecture white papers |
//! | compute capability | 9.0 | 9.0 | 8.0 | 8.9 | CUDA programming guide |
//! | host link | 53 GB/s (PCIe 5 x16) | 53 GB/s | 25 GB/s (PCIe 4 x16) | 25 GB/s | usable of 63 and 31.5 GB/s raw, each way; see below |
//! | copy engines | 3 | 3 | 3 | 2 | `cudaDeviceProp::asyncEngineCount` as commonly reported |
//!
//! GB10 and Jetson AGX Orin share the host's memory, of which they have all: data sheets and guesses,
//! nothing measured. A copy there reads and writes the same memory. Orin can reserve 31 GiB of
//! addresses (llama.cpp issue 29142: 32 GiB refused). A program that takes more than is left loses
//! such a device, as the system would end the process. Pinned memory does not count.
//!
//! Of a PCIe 4 x16 link 22.5 to 26.6 GB/s are reported for pinned memory (cuda-oxide issue
//! 976: 22.5–23.9 to and 25.4–26.6 from an RTX 4090; spark-rapids-jni issue 4593: 26.35 from the
//! device), of PCIe 5 x16 about twice that, 50 to 55 GB/s. [`crate::SimConfig::link_gb_s`] sets
//! another speed.
//!
//! Costs of memory calls, in µs. Those of Hopper were measured on an H200 with driver 580.159 in a
//! virtual machine (`docs/hardware/`, `aquifer-bench calls`), and fit its medians for 2 MiB to 2
//! GiB and for 1 to 64 mappings within a third. The other cards have estimates: V is the table of
//! latencies in vAttention (arXiv 2405.04437), for 2 MiB on an A100; G is the table in GMLake
//! (ASPLOS 2024), for 2 GiB in chunks of 2 MiB, 128 MiB and 1 GiB relative to one `cuMemAlloc` of 2
//! GiB, which is taken as 1 ms. Both are quoted from memory; where they differ the dearer one
//! counts.
//!
//! | call | Hopper: fixed, a mapping, a MiB | estimate | source of the estimate |
//! | --- | --- | --- | --- |
//! | `cuMemAlloc` | 85, 0, 0.07 | 66, 0, 0.45 | rmm issue 284: 100 000 `cudaMalloc` in 6649 ms; growth is a guess that makes 2 GiB 1 ms |
//! | `cuMemFree` | 60, 0, 0.57 | 66, 0, 0.2 | as above |
//! | `cuMemAddressReserve`, `cuMemAddressFree` | 7; 8 | 2; 1 | V: 2 and 1 |
//! | `cuMemCreate` | 27, 0, 0.03 | 28.2, 0, 0.4 | V: 29; G: 18, 56 and 395 a call |
//! | `cuMemMap` | 3.3 | 2 | V: 2; G: 0.7, 0.6 and 1 |
//! | `cuMemSetAccess` | 8, 32, 0.05 | 10, 84, 0.25 | V: 38; G: 95, 513 and 350 a call of one mapping; the split is a guess |
//! | `cuMemUnmap` | 3, 21, 0.02 | 4, 30, 0.05 | V: 34; the split and the growth are guesses |
//! | `cuMemRelease` | 30, 0, 0.54 | 23 | V: 23 |
//! | `cuMemGetInfo` | 27 | 5 | |
//!
//! `cuMemSetAccess` and `cuMemUnmap` cost by the mapping rather than by the call, as a note in
//! PyTorch's allocator says (pull request 96995) and the H200 confirmed: a call over many mappings
//! saves little.
//!
//! Launches and asynchronous calls 2.5 µs, events and queries 0.3–0.6 µs, pinning 0.3 ms/MiB,
//! loading a module 1 ms: orders of magnitude.

use aquifer_device::Operation;

const GIB: u64 = 1 << 30;

/// A card whose capacity and speed the simulated device takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Preset {
    /// NVIDIA H100 SXM, 80 GiB.
    H100,
    /// NVIDIA H200 SXM, 141 GiB.
    H200,
    /// NVIDIA A100 SXM, 80 GiB.
    A100,
    /// NVIDIA GeForce RTX 4090, 24 GiB.
    Rtx4090,
    /// NVIDIA GB10, which shares 128 GiB with the host.
    Gb10,
    /// NVIDIA Jetson AGX Orin, which shares 64 GiB with the host and refuses large reservations of
    /// addresses.
    Orin,
}

impl Preset {
    /// Every preset.
    pub const ALL: &[Preset] = &[Preset::H100, Preset::H200, Preset::A100, Preset::Rtx4090, Preset::Gb10, Preset::Orin];

    /// The name in device strings, such as `"h100"`.
    pub const fn name(self) -> &'static str {
        match self {
            Preset::H100 => "h100",
            Preset::H200 => "h200",
            Preset::A100 => "a100",
            Preset::Rtx4090 => "rtx4090",
            Preset::Gb10 => "gb10",
            Preset::Orin => "orin",
        }
    }

    /// The preset with the given name; case does not matter.
    pub fn from_name(name: &str) -> Option<Preset> {
        Preset::ALL.iter().copied().find(|preset| preset.name().eq_ignore_ascii_case(name))
    }

    /// Memory of the card in bytes.
    pub const fn memory_bytes(self) -> u64 {
        match self {
            Preset::H100 | Preset::A100 => 80 * GIB,
            Preset::H200 => 141 * GIB,
            Preset::Rtx4090 => 24 * GIB,
            Preset::Gb10 => 128 * GIB,
            Preset::Orin => 64 * GIB,
        }
    }

    pub(crate) fn addresses(self) -> Option<u64> {
        (self == Preset::Orin).then_some(31 * GIB)
    }

    pub(crate) const fn card(self) -> Card {
        match self {
            Preset::H100 => Card::new("H100", 3350, 53, 67_000, 132, (9, 0), 3, true),
            Preset::H200 => Card::new("H200", 4800, 53, 67_000, 132, (9, 0), 3, true),
            Preset::A100 => Card::new("A100", 2039, 25, 19_500, 108, (8, 0), 3, true),
            Preset::Rtx4090 => Card::new("RTX 4090", 1008, 25, 82_600, 128, (8, 9), 2, false),
            Preset::Gb10 => Card::new("GB10", 273, 136, 31_000, 48, (12, 1), 1, false).of_host(),
            Preset::Orin => Card::new("Orin", 205, 102, 5_300, 16, (8, 7), 1, false).of_host(),
        }
    }
}

/// The figures of a card for the cost model and the attributes. 1 GB/s is one byte a nanosecond.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Card {
    pub(crate) name: &'static str,
    pub(crate) memory_gb_s: u64,
    pub(crate) link_gb_s: u64,
    pub(crate) gflops: u64,
    pub(crate) multiprocessors: u64,
    pub(crate) capability: (u32, u32),
    pub(crate) copy_engines: u64,
    pub(crate) rdma: bool,
    pub(crate) shares_host_memory: bool,
}

impl Card {
    #[allow(clippy::too_many_arguments, reason = "a row of the table above")]
    const fn new(
        name: &'static str,
        memory_gb_s: u64,
        link_gb_s: u64,
        gflops: u64,
        multiprocessors: u64,
        capability: (u32, u32),
        copy_engines: u64,
        rdma: bool,
    ) -> Card {
        let shares_host_memory = false;
        Card {
            name,
            memory_gb_s,
            link_gb_s,
            gflops,
            multiprocessors,
            capability,
            copy_engines,
            rdma,
            shares_host_memory,
        }
    }

    /// The same with the host's memory.
    const fn of_host(self) -> Card {
        Card { shares_host_memory: true, ..self }
    }

    /// Nanoseconds of a call: fixed, a mapping, and a MiB.
    fn costs(self, operation: Operation) -> (u64, u64, u64) {
        let measured = if self.capability == (9, 0) { on_hopper(operation) } else { None };
        measured.unwrap_or_else(|| estimated(operation))
    }

    /// Virtual nanoseconds that the host spends in a call about `bytes` bytes;
    /// [`Card::mappings_cost_ns`] comes on top.
    pub(crate) fn call_cost_ns(self, operation: Operation, bytes: u64) -> u64 {
        let (fixed, _, ns_per_mib) = self.costs(operation);
        (bytes >> 20).saturating_mul(ns_per_mib).saturating_add(fixed)
    }

    /// Virtual nanoseconds that a call takes for the mappings that it covers.
    pub(crate) fn mappings_cost_ns(self, operation: Operation, mappings: u64) -> u64 {
        mappings.saturating_mul(self.costs(operation).1)
    }
}

/// Costs of calls about memory on Hopper: nanoseconds fixed, a mapping, and a MiB. `None` for
/// calls that were not measured.
const fn on_hopper(operation: Operation) -> Option<(u64, u64, u64)> {
    Some(match operation {
        Operation::Alloc => (85_000, 0, 70),
        Operation::Free => (60_000, 0, 570),
        Operation::Reserve => (7_000, 0, 0),
        Operation::Unreserve => (8_000, 0, 0),
        Operation::CreatePhysical => (27_000, 0, 30),
        Operation::ReleasePhysical => (30_000, 0, 540),
        Operation::Map => (3_300, 0, 0),
        Operation::Unmap => (3_000, 21_000, 20),
        Operation::SetAccess => (8_000, 32_000, 50),
        Operation::MemoryInfo => (27_000, 0, 0),
        _ => return None,
    })
}

/// Costs of calls on other cards, and of calls that were not measured: nanoseconds fixed, a
/// mapping, and a MiB.
const fn estimated(operation: Operation) -> (u64, u64, u64) {
    let (fixed, ns_per_mib) = match operation {
        Operation::Alloc => (66_000, 450),
        Operation::Free => (66_000, 200),
        Operation::AllocAsync | Operation::FreeAsync => (2_000, 0),
        Operation::Reserve => (2_000, 0),
        Operation::Unreserve => (1_000, 0),
        Operation::CreatePhysical => (28_200, 400),
        Operation::ReleasePhysical => (23_000, 0),
        Operation::Map => (2_000, 0),
        Operation::Unmap => return (4_000, 30_000, 50),
        Operation::SetAccess => return (10_000, 84_000, 250),
        Operation::HostAlloc => (50_000, 300_000),
        Operation::HostFree => (50_000, 50_000),
        Operation::CreateStream | Operation::DestroyStream => (10_000, 0),
        Operation::CreateEvent | Operation::DestroyEvent => (500, 0),
        Operation::Record | Operation::Wait => (600, 0),
        Operation::QueryEvent | Operation::QueryStream | Operation::ElapsedTime => (300, 0),
        Operation::SynchronizeEvent | Operation::SynchronizeStream | Operation::Synchronize => (1_000, 0),
        Operation::MemoryInfo => (5_000, 0),
        Operation::CopyToDevice
        | Operation::CopyToHost
        | Operation::CopyOnDevice
        | Operation::CopyPeer
        | Operation::Copy2d
        | Operation::CopyBatch
        | Operation::Memset
        | Operation::Launch => (2_500, 0),
        Operation::BeginCapture | Operation::EndCapture | Operation::LaunchGraph | Operation::DestroyGraph => {
            (10_000, 0)
        }
        Operation::LoadModule => (1_000_000, 0),
        Operation::UnloadModule => (100_000, 0),
        Operation::HostRegister => (50_000, 100_000),
        Operation::HostUnregister => (50_000, 20_000),
        Operation::CaptureStatus | Operation::StreamId => (100, 0),
        Operation::PoolUsage | Operation::TrimPool | Operation::TrimGraphMemory => (1_000, 0),
        // Questions that the driver answers from memory.
        _ => (100, 0),
    };
    (fixed, 0, ns_per_mib)
}
