//! cuBLAS and NCCL on memory from Aquifer. A library that is not installed is left out, and so
//! said.
use aquifer::prelude::*;
use aquifer_cudarc::{AllocatorExt, Error, StreamExt};
use cudarc::cublas::{self, CudaBlas, Gemm, GemmConfig};
use cudarc::driver::CudaContext;
use cudarc::nccl::{self, Comm, ReduceOp};

const N: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = CudaContext::new(0)?;
    let (memory, stream) = (aquifer_cudarc::allocator(&context)?, context.new_stream()?);
    let ours = aquifer_cudarc::stream(&stream)?;
    let a = memory.from_slice(&[0.5_f32; N * N], &ours)?;
    let b = memory.from_slice(&[2.0_f32; N * N], &ours)?;
    let mut c = memory.alloc_zeros_on::<f32>(N * N, &stream)?;

    // SAFETY: it only looks for the library.
    if unsafe { cublas::sys::is_culib_present() } {
        let blas = CudaBlas::new(stream.clone())?;
        let n = i32::try_from(N)?;
        let (transa, transb) = [cublas::sys::cublasOperation_t::CUBLAS_OP_N; 2].into();
        let config =
            GemmConfig { transa, transb, m: n, n, k: n, alpha: 1.0_f32, lda: n, ldb: n, beta: 0.0_f32, ldc: n };
        stream.with([read(&a), read(&b), write(&mut c)], |stream, [a, b, c]| {
            let (a, b, mut c) = (a.as_slice::<f32>(stream)?, b.as_slice(stream)?, c.as_slice(stream)?);
            // SAFETY: the matrices have the sizes that the configuration tells.
            unsafe { blas.gemm(config, &*a, &*b, &mut *c) }.map_err(Error::library)
        })?;
        assert_eq!(c.slice(..1).item(&ours)?, 256.0);
        println!("cuBLAS: C = A B");
    } else {
        println!("cuBLAS: left out, the library is not installed");
    }

    // SAFETY: it only looks for the library.
    if unsafe { nccl::sys::is_culib_present() } {
        let [comm] = <[Comm; 1]>::try_from(Comm::from_devices(vec![stream.clone()]).map_err(Error::library)?)
            .map_err(Error::library)?;
        stream.with([write(&mut c)], |stream, [c]| {
            comm.all_reduce_in_place(&mut *c.as_slice::<f32>(stream)?, &ReduceOp::Sum).map(drop).map_err(Error::library)
        })?;
        stream.synchronize()?;
        println!("NCCL: all-reduce over one GPU");
    } else {
        println!("NCCL: left out, the library is not installed");
    }
    Ok(())
}
