//! A library placed before the CUDA driver, so that a program which is already built takes its
//! memory from Aquifer:
//!
//! ```text
//! aquifer-stress run -- PROGRAM ARGS…
//! ```
//!
//! It exports the driver's functions about memory, and serves them. What it serves, passes through
//! and refuses is listed in `docs/embedding.md`.
//!
//! # How it takes the driver's place
//!
//! The command makes a folder with symbolic links, and puts it first on the library path of the
//! program:
//!
//! | name | leads to |
//! | --- | --- |
//! | `libcuda.so`, `libcuda.so.1` | this library, whose `SONAME` is `libcuda.so.1` |
//! | `libaquifer_driver.so` | the driver, on which this library depends by this name (`DT_NEEDED`) |
//!
//! The library also depends on `libcuda.so`, which is itself, before the driver: a driver may have
//! this name as its own, and would be found by it once it is loaded.
//!
//! Where a program looks a function up, with `dlsym` on the library's handle or because it is
//! linked to `libcuda.so.1`, the system's loader searches this library, then what it depends on. It
//! finds the functions here, and all others in the driver itself: calls that pass through take no
//! detour, those of newer drivers included, and what a driver lacks is not there.
//! `cuGetProcAddress` is answered by the driver, and the functions here replace the driver's in its
//! answers.
//!
//! Aquifer's own calls go to `libaquifer_driver.so`, so that they do not come back here.
//!
//! # Environment
//!
//! The process's allocators read their options as in any program: `AQUIFER_ALLOC_CONF`, else those
//! of PyTorch. Also:
//!
//! | variable | what it does |
//! | --- | --- |
//! | `AQUIFER_PASS` | functions that the driver serves, separated by commas: `cuMemAlloc`, `cuMemAllocPitch`, `cuMemAllocAsync`, `cuMemAllocFromPoolAsync` |
//! | `AQUIFER_REPORT` | a report when the process ends: `stderr`, or a file that it is appended to |
//! | `AQUIFER_SNAPSHOT` | a file for a memory snapshot when the process ends; later devices' files have their ordinal in the name |
//! | `AQUIFER_LIVE` | a folder, in which each process replaces a file named by its process id twice a second: for each device a line of its ordinal, limit, bytes reserved and allocated, the share that is free beside live blocks and cannot go back, allocations and refusals |
//!
//! Reports and snapshots need a process that ends by `exit` or by returning from `main`.
//!
//! # Order
//!
//! `lookup` finds functions · `memory` and `pointers` serve them · `answer` decides who answers ·
//! `gpu` knows contexts and streams · `driver` calls what is behind · `live` writes readings
//! while the process runs · `report` tells at the end.
//!
//! It is built for 64-bit Linux. Elsewhere the crate is empty.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]
#![allow(non_snake_case, reason = "the exported functions have the driver's names")]

mod answer;
mod driver;
mod gpu;
mod live;
mod lookup;
mod memory;
mod options;
mod pointers;
mod report;
