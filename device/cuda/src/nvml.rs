//! NVIDIA's management library (NVML), which knows how much memory each process holds. It comes
//! with the driver, is loaded on first use, and stays.
//!
//! The library and any of its answers may be missing: it is absent in some containers, which also
//! hide the ids of processes; parts of a GPU (MIG) have other ids than the GPU; and Windows keeps
//! the memory of processes to itself. Then that part is unknown, which is no error.

use std::sync::OnceLock;
use std::{env, process};

use aquifer_device::{MemoryUsers, ProcessMemory};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use crate::gpu::Gpu;

/// Names the library, if it is not the one that the system finds.
const VARIABLE: &str = "AQUIFER_NVML_LIBRARY";

/// Loaded once. A failure is kept, too: the library is asked when memory runs out, maybe often.
static NVML: OnceLock<Option<Nvml>> = OnceLock::new();

pub(crate) fn memory_users(gpu: &Gpu) -> MemoryUsers {
    let Some(nvml) = NVML.get_or_init(load) else { return MemoryUsers::default() };
    let Some(uuid) = uuid(gpu) else { return MemoryUsers::default() };
    ask(nvml, &uuid).unwrap_or_else(|error| {
        tracing::debug!(%error, "NVML does not attribute the memory of the GPU");
        MemoryUsers::default()
    })
}

fn load() -> Option<Nvml> {
    let named = env::var_os(VARIABLE).filter(|name| !name.is_empty());
    let mut builder = Nvml::builder();
    if let Some(name) = &named {
        builder.lib_path(name);
    }
    builder.init().inspect_err(|error| tracing::debug!(%error, "NVML cannot be used")).ok()
}

/// The GPU's id as NVML writes it. Unlike an ordinal it does not depend on `CUDA_VISIBLE_DEVICES`,
/// and a part of a GPU has one that names no GPU.
fn uuid(gpu: &Gpu) -> Option<String> {
    let ask = gpu.context.functions().cuDeviceGetUuid_v2?;
    let mut id = [0; 16];
    // SAFETY: the bytes outlive the call (F1).
    if unsafe { ask(&raw mut id, gpu.context.device) } != 0 {
        return None;
    }
    let hex = |part: &[u8]| part.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parts = [&id[..4], &id[4..6], &id[6..8], &id[8..10], &id[10..]].map(hex);
    Some(format!("GPU-{}", parts.join("-")))
}

fn ask(nvml: &Nvml, uuid: &str) -> Result<MemoryUsers, NvmlError> {
    let device = nvml.device_by_uuid(uuid)?;
    let mut users = MemoryUsers::default();
    users.driver = device.memory_info().ok().map(|memory| memory.reserved);
    let mut processes = device.running_compute_processes().unwrap_or_default();
    // A process may be in both lists, with all its memory in each.
    let mut graphics = device.running_graphics_processes().unwrap_or_default();
    graphics.retain(|one| one.pid == 0 || processes.iter().all(|other| other.pid != one.pid));
    processes.append(&mut graphics);
    let (own, others): (Vec<_>, Vec<_>) = processes.iter().partition(|one| one.pid == process::id());
    users.own = own.first().and_then(|one| bytes(one));
    if users.own.is_some() {
        // A process that is hidden from this one has id 0.
        let memory = |one: &ProcessInfo| Some(ProcessMemory::new((one.pid > 0).then_some(one.pid), bytes(one)?));
        users.others = others.into_iter().filter_map(memory).collect();
        users.others.sort_by_key(|one| std::cmp::Reverse(one.bytes));
    }
    Ok(users)
}

fn bytes(process: &ProcessInfo) -> Option<u64> {
    match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    }
}
