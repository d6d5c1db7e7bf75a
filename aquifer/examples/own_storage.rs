//! A tensor type of another crate over Aquifer's memory: docs/your-own-storage.md.
use std::sync::Arc;

use aquifer::device::{HostKernel, KernelArg, Launch};
use aquifer::prelude::*;

struct Matrix {
    data: Buffer<f32>,
    shape: [u32; 2],
    strides: [u32; 2],
}

#[derive(Debug)]
enum MyError {
    Empty,
    Memory(aquifer::Error),
}

/// Of every call here, and of `with`.
impl<E: Into<aquifer::Error>> From<E> for MyError {
    fn from(error: E) -> MyError {
        MyError::Memory(error.into())
    }
}

impl Matrix {
    fn new(shape: [u32; 2], memory: &Allocator, stream: &Stream) -> Result<Matrix, MyError> {
        let len = shape[0] as usize * shape[1] as usize;
        let data = if len > 0 { memory.alloc(len, stream)? } else { return Err(MyError::Empty) };
        Ok(Matrix { data, shape, strides: [shape[1], 1] })
    }

    /// A view: the memory lives as long as one of the handles.
    fn transposed(&self) -> Matrix {
        let ([rows, columns], [down, right]) = (self.shape, self.strides);
        Matrix { data: self.data.share(), shape: [columns, rows], strides: [right, down] }
    }

    /// Gives each element the number of its row, by a kernel of one's own.
    fn number_rows(&mut self, stream: &Stream) -> Result<(), MyError> {
        let args = [self.shape[0], self.shape[1], self.strides[0], self.strides[1]];
        Ok(with(stream, [write(&mut self.data)], |stream, [data]| {
            let launch = Launch {
                name: "number_rows",
                module: None, // on a GPU: Some(device.driver().load_module(PTX)?), once
                grid: [args[0], args[1].div_ceil(256), 1],
                block: [1, 256, 1],
                args: [&[KernelArg::Ptr(data.ptr())][..], &args.map(KernelArg::U32)].concat(),
                accesses: vec![data.range()],
                host: Some(on_host(args)),
                ..Launch::default()
            };
            // SAFETY: the kernel takes these arguments, and writes `data` alone.
            unsafe { stream.launch(&launch) }
        })?)
    }
}

/// The kernel as a simulated device runs it.
fn on_host([rows, columns, down, right]: [u32; 4]) -> HostKernel {
    Arc::new(move |memory, args| {
        let KernelArg::Ptr(data) = args[0] else { return Ok(()) };
        let all =
            (0..rows).flat_map(|row| (0..columns).map(move |column| (row, u64::from(row * down + column * right))));
        all.into_iter().try_for_each(|(row, place)| memory.write(data.offset(4 * place), &(row as f32).to_ne_bytes()))
    })
}

fn main() -> Result<(), MyError> {
    let device = aquifer::open("sim:1GiB,violations=panic")?;
    let (memory, one, two) = (Allocator::of(&device)?, device.stream()?, device.stream()?);
    let matrix = Matrix::new([2, 3], &memory, &one)?;
    let mut view = matrix.transposed();
    view.number_rows(&two)?; // after what `one` does with the memory
    drop(view); // on any thread, while `two` is at work: no call of the driver, no wait
    assert_eq!(matrix.data.to_vec(&one)?, [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]); // after the kernel on `two`
    assert!(matches!(Matrix::new([0, 3], &memory, &one), Err(MyError::Empty)));
    assert!(
        matches!(Matrix::new([1 << 30; 2], &memory, &one), Err(MyError::Memory(error)) if error.is_out_of_memory())
    );
    Ok(())
}
