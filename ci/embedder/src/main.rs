//! Names what of both an embedder would, so that both are compiled and linked into one program; see Cargo.toml.
//! Without a driver forebay answers with an error, and nothing ends the program.

use cudarc::driver::CudaContext;
use forebay::device::cuda::{CudaDevice, CudaOptions};

fn main() {
    println!("beside {}:", std::any::type_name::<CudaContext>());
    match CudaDevice::new(CudaOptions::default()) {
        Ok(_) => println!("a CUDA device"),
        Err(error) => println!("{error}"),
    }
}
